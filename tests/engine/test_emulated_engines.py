"""vLLM's GPU worker with ours in it, on a GPU that is emulated: late work, streams, full graphs.

Whatever the schedule, steps and counters are those of the CPU platform, which is never late. Each
run has an engine of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from emulated import torch_cuda
from support import importing_support
from support.engines import engine, fix_costs, proposer_of, runner_of, scheduler_of
from support.schedules import (
    GRAPHS,
    ON_GPU,
    SCENARIOS,
    SCHEDULES,
    outcome_of,
    tokens_of,
)

pytestmark = pytest.mark.emulated
NAMES = [*SCENARIOS, *(f"asynchronous: {name}" for name in SCENARIOS if "plain" not in name)]


@cache
def on_cpu() -> dict[str, Any]:
    """Outcomes by name, from one process for all tests."""
    command = [sys.executable, "-m", "support.cpu_outcomes", *NAMES]
    done = subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def child_environment() -> dict[str, str]:
    """As this process was started: what the emulated device has set is taken out."""
    import os

    ours = ("TORCHDYNAMO_DISABLE", "TRITON_INTERPRET")
    return {k: v for k, v in os.environ.items() if k not in ours} | importing_support()


def run(name: str, schedule: str, *, is_async: bool, **settings: Any) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    with engine(
        async_scheduling=is_async, **{**scenario.settings, **ON_GPU, **settings}
    ) as llm:
        SCHEDULES[schedule](llm)
        try:
            return outcome_of(llm, scenario)
        finally:
            SCHEDULES["latest"](llm)


@pytest.mark.parametrize("graphs", [{}, GRAPHS], ids=["eager", "graphs"])
def test_plain_decoding_writes_what_the_cpu_platform_writes(graphs: dict[str, Any]) -> None:
    assert tokens_of(run("plain", "latest", is_async=True, **graphs)) == tokens_of(
        on_cpu()["plain"]
    )


def expected(name: str, *, is_async: bool) -> dict[str, Any]:
    return on_cpu()[f"asynchronous: {name}" if is_async else name]


DRAFTING = [name for name in SCENARIOS if "plain" not in name]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_eager_engine_steps_and_counts_as_on_the_cpu_platform(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_costs(monkeypatch)
    found = run("any length", schedule, is_async=True)
    assert found == expected("any length", is_async=True)
    assert found["counters"]["accepted_tokens"] > 0


@pytest.mark.parametrize("name", DRAFTING)
@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "synchronous"])
def test_each_kind_of_drafting_steps_and_counts_as_on_the_cpu_platform(
    name: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_costs(monkeypatch)
    graphs = GRAPHS if SCENARIOS[name].is_trimmed else {}
    found = run(name, "random 1", is_async=is_async, **graphs)
    assert found == expected(name, is_async=is_async)
