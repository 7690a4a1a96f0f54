"""Engines on the emulated GPU, watched while they step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm import LLM

from emulated import races, torch_cuda
from support.engines import engine, runner_of, with_fixed_costs
from support.schedules import GRAPHS, ON_GPU, SCHEDULES, SIZES


@contextmanager
def watched(schedule: str, *, has_graphs: bool, **settings: Any) -> Iterator[LLM]:
    """An engine that schedules ahead. At the end: in no step inside has the host waited for more
    than outputs, has a stream missed a wait, or a buffer moved."""
    device = torch_cuda.device()
    settings = {**SIZES, **ON_GPU, **(GRAPHS if has_graphs else {}), **settings}
    with (
        races.found() as missing,
        with_fixed_costs(),
        engine(async_scheduling=True, **settings) as llm,
    ):
        assert bool(runner_of(llm).cudagraph_manager.graphs) == has_graphs
        SCHEDULES[schedule](llm)
        races.forget()  # outputs of a warm-up are freed while they are copied: nobody reads them
        device.forget_counts()
        try:
            yield llm
        finally:
            SCHEDULES["latest"](llm)
        waits = device.waits()
        (stats,) = llm.collective_rpc("dflash_stats")
    assert missing == {}, missing
    assert waits == {}, waits
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
