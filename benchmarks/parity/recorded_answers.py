"""Answers of an engine whose drafting is recorded."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_dflash.tools.engine_answers import EngineAnswers

START = "parity.recorded_answers:RecordedAnswers.start"
"""What an `EngineProcess` starts for these answers. It needs `importing_benchmarks`."""


class RecordedAnswers(EngineAnswers):
    """Answers of an engine with `RecordedDrafting` as worker extension."""

    def record(self, token_ids: list[int], tokens: int, file: str) -> list[int]:
        """Continue tokens greedily, and write a recording of the drafting to the file."""
        self._engine.collective_rpc("record_drafting")
        self.add("recorded", token_ids, tokens, whole=True, ignore_eos=True)
        while not (finished := self.step()):
            pass
        self._engine.collective_rpc("take_recording", args=(file,))
        return list(finished[0].token_ids)


def importing_benchmarks() -> dict[str, str]:
    """Return the environment of a process that must find the modules of benchmarks/, too."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
