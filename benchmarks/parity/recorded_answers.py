"""Answers of an engine whose drafting is recorded."""

from __future__ import annotations

from stepped_engine import SteppedEngine

START = "parity.recorded_answers:RecordedAnswers.start"
"""What an `EngineChild` starts for these answers."""


class RecordedAnswers(SteppedEngine):
    """Answers of an engine with `RecordedDrafting` as worker extension."""

    def record(self, token_ids: list[int], tokens: int, file: str) -> list[int]:
        """Continue tokens greedily, and write a recording of the drafting to the file."""
        self._engine.collective_rpc("record_drafting")
        self.add("recorded", token_ids, tokens, whole=True, ignore_eos=True)
        while not (finished := self.step()):
            pass
        self._engine.collective_rpc("take_recording", args=(file,))
        return list(finished[0].token_ids)
