"""Engines on the emulated GPU, watched while they step, and compared with the CPU platform."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from vllm import LLM

from emulated import races, torch_cuda
from support import importing_support
from support.engines import engine, runner_of, with_fixed_costs
from support.kernel_variants import compiled
from support.schedules import GRAPHS, ON_GPU, SCENARIOS, SCHEDULES, SIZES, outcome_of
from vllm_dflash.engine.worker import DraftingWorker

ON_CPU = (
    "plain",
    "planned",
    *(f"asynchronous: {name}" for name in SCENARIOS if name not in ("plain", "trees")),
)


def on_cpu(name: str) -> dict[str, Any]:
    """Return a scenario's outcome on the CPU platform; its name may begin "asynchronous: "."""
    return _on_cpu(ON_CPU if name in ON_CPU else (name,))[name]


@cache
def _on_cpu(names: tuple[str, ...]) -> dict[str, Any]:
    """Return outcomes of one process, which serves nearly all tests."""
    emulated = ("TORCHDYNAMO_DISABLE", "TRITON_INTERPRET")
    before = {name: value for name, value in os.environ.items() if name not in emulated}
    command = [sys.executable, "-m", "support.cpu_outcomes", *names]
    environment = before | importing_support()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def watched(
    schedule: str, *, has_graphs: bool, is_async: bool = True, **settings: Any
) -> Iterator[LLM]:
    """Start an engine and watch its steps; check at the end that the host has waited only for
    outputs, no stream has missed a wait, no buffer has moved, and no kernel had to be compiled.
    (Without graphs, vLLM does not warm up: its `enable_jit_warmup`.)"""
    device = torch_cuda.device()
    settings = {**SIZES, **ON_GPU, **(GRAPHS if has_graphs else {}), **settings}
    with (
        races.found() as missing,
        waits_of_steps() as waited,
        compiled() as variants,
        with_fixed_costs(),
        engine(async_scheduling=is_async, **settings) as llm,
    ):
        core = llm.llm_engine.engine_core.engine_core
        assert core.async_scheduling == is_async
        warms_up = core.vllm_config.kernel_config.enable_jit_warmup
        assert warms_up == has_graphs
        assert bool(runner_of(llm).cudagraph_manager.graphs) == has_graphs
        SCHEDULES[schedule](llm)
        races.forget()  # outputs of a warm-up are freed while they are copied; they are not read
        device.forget_counts()
        waited.clear()
        at_start = frozenset(variants)
        try:
            yield llm
        finally:
            SCHEDULES["latest"](llm)
        waits = device.waits()
        if "speculative_config" in settings:
            (stats,) = llm.collective_rpc("dflash_stats")
            assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
    if warms_up:
        assert variants == at_start, sorted(variants - at_start)
    assert missing == {}, missing
    assert waits == {}, waits
    assert waited == {}, waited


@contextmanager
def waits_of_steps() -> Iterator[Counter[str]]:
    """Count what a worker's steps wait for, whether asked for or not. Outputs are fetched outside
    of the steps."""
    found, running = Counter[str](), threading.local()

    def note(_: str, name: str) -> None:
        if getattr(running, "step", False):
            found[f"{name} @ {races.here()}"] += 1

    with pytest.MonkeyPatch.context() as patch:
        for name in ("execute_model", "sample_tokens"):
            original = getattr(DraftingWorker, name)

            def step(worker: Any, *args: Any, original: Any = original) -> Any:
                running.step = True
                try:
                    return original(worker, *args)
                finally:
                    running.step = False

            patch.setattr(DraftingWorker, name, step)
        torch_cuda.device().set_hook(note)
        try:
            yield found
        finally:
            torch_cuda.device().set_hook(None)


def run(name: str, schedule: str, *, has_graphs: bool, **settings: Any) -> dict[str, Any]:
    """Return the outcome of a scenario in its own, watched engine."""
    scenario = SCENARIOS[name]
    settings = {**scenario.settings, **settings}
    with watched(schedule, has_graphs=has_graphs, **settings) as llm:
        return outcome_of(llm, scenario)
