"""Engines on the emulated GPU, held against the CPU platform: each in which nobody waits and no
stream misses a wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from typing import Any

from emulated import races, torch_cuda
from support import importing_support
from support.engines import engine, runner_of, with_fixed_costs
from support.schedules import GRAPHS, ON_GPU, SCENARIOS, SCHEDULES, outcome_of

ON_CPU = (
    "plain",
    "any length",
    *(f"asynchronous: {name}" for name in SCENARIOS if name not in ("plain", "trees")),
)


def on_cpu(name: str) -> dict[str, Any]:
    """The outcome of a scenario on the CPU platform; "asynchronous: " may stand before its name."""
    return _on_cpu(ON_CPU if name in ON_CPU else (name,))[name]


@cache
def _on_cpu(names: tuple[str, ...]) -> dict[str, Any]:
    """From one process for nearly all tests."""
    emulated = ("TORCHDYNAMO_DISABLE", "TRITON_INTERPRET")
    before = {name: value for name, value in os.environ.items() if name not in emulated}
    command = [sys.executable, "-m", "support.cpu_outcomes", *names]
    environment = before | importing_support()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def run(
    name: str,
    schedule: str,
    *,
    is_async: bool = True,
    has_graphs: bool,
    **settings: Any,
) -> dict[str, Any]:
    """The outcome of an engine of its own, in whose steps nobody waits but for outputs."""
    scenario = SCENARIOS[name]
    settings = {**scenario.settings, **ON_GPU, **(GRAPHS if has_graphs else {}), **settings}
    device = torch_cuda.device()
    with (
        races.found() as missing,
        with_fixed_costs(),
        engine(async_scheduling=is_async, **settings) as llm,
    ):
        core = llm.llm_engine.engine_core.engine_core
        assert core.async_scheduling == is_async
        SCHEDULES[schedule](llm)
        races.forget()  # outputs of a warm-up are freed while they are copied: nobody reads them
        device.forget_counts()
        try:
            outcome = outcome_of(llm, scenario)
        finally:
            SCHEDULES["latest"](llm)
        waits, captured = device.waits(), runner_of(llm).cudagraph_manager.graphs
        assert bool(captured) == has_graphs
    assert missing == {}
    assert waits == {}
    return outcome
