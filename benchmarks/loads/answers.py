"""Answers of an engine that is measured with more loads, or timed from inside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from loads.measures import measure_arrivals, measure_decoding, measure_swing
from vllm_dflash.tools.engine_answers import EngineAnswers

START = "loads.answers:LoadsAnswers.start"
"""What an `EngineProcess` starts for these answers. It needs `importing_benchmarks`."""


class LoadsAnswers(EngineAnswers):
    """Answers questions about more loads."""

    arrivals, decoding, swing = measure_arrivals, measure_decoding, measure_swing

    def step_times(self) -> dict[str, float]:
        """Return times of steps since the first call. Needs `TimedSteps` as worker extension."""
        return self._engine.collective_rpc("step_times")[0]

    def where(self, **load: Any) -> dict[str, Any]:
        """Measure `answers` if `load` has any, otherwise `decoding`.

        `spent` in the result is the increase of `step_times`.
        """
        if "answers" not in load:
            return self.decoding(read=self.step_times, **load)
        before = self.step_times()
        result = self.answers(**load)
        after = self.step_times()
        return result | {"spent": {name: after[name] - before[name] for name in after}}


def importing_benchmarks() -> dict[str, str]:
    """Return the environment of a process that must find the modules of benchmarks/, too."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
