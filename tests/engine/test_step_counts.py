"""A warm step on V2 does the same for any batch, and launches hardly more than vLLM's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from vllm import LLM, EngineArgs
from vllm.model_executor.model_loader import utils as loading

from support.device_decisions import directed, drafting, lengths_in_turn
from support.engines import (
    DFLASH,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    scheduler_of,
    worker_of,
)
from support.schedules import GRAPHS, ON_GPU, SIZES
from support.step_counts import launches_counted, lines_counted
from vllm_dflash.engine.worker import DraftingWorker
from vllm_dflash.model.registration import restore_draft_model
from vllm_dflash.plugin import register

pytestmark = pytest.mark.v2
PROMPTS = [text[:80] for text in held_out_prompts(6)]
WARM_UP, STEPS = 4, 8


def warm_steps(llm: LLM, count: int, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """Return our lines that ran in each of the worker's steps; all `count` requests decode."""
    core, seen = llm.llm_engine, list[Counter[str]]()
    for number in range(count):
        core.add_request(str(number), PROMPTS[number], greedy(200, ignore_eos=True))
    for _ in range(WARM_UP):
        core.step()
    with monkeypatch.context() as patch:
        for name in ("execute_model", "sample_tokens"):
            original = getattr(DraftingWorker, name)

            def watched(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
                if name == "execute_model":
                    seen.append(Counter())
                with lines_counted(seen[-1]):
                    return original(self, *args)

            patch.setattr(DraftingWorker, name, watched)
        for _ in range(STEPS):
            core.step()
    core.abort_request([str(number) for number in range(count)])
    while core.has_unfinished_requests():
        core.step()
    return seen


def test_steps_of_more_requests_run_no_more_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own part of a step in Python: it has no loop over requests. Some watched steps have a
    block, some have none, and in some the requests have different lengths."""
    kinds = cycle(
        [
            lambda most: drafting(most, runs_block=True),
            lambda most: drafting(np.minimum(most, 3), runs_block=False),
            lambda most: drafting(np.zeros_like(most), runs_block=False),
            lambda most: drafting(np.minimum(most, np.arange(len(most)) % 3), runs_block=True),
        ]
    )
    with engine("asynchronous", speculative_config=dict(DFLASH), max_num_seqs=6) as llm:
        assert proposer_of(llm).free_drafts is not None
        directed(llm, monkeypatch, lambda most: next(kinds)(most))
        monkeypatch.setattr(worker_of(llm), "_ticking", ())  # these act now and then
        monkeypatch.setattr(scheduler_of(llm), "_update_in", 1000)  # nor is anything sent
        few, many = (
            {frozenset(step.items()) for step in warm_steps(llm, count, monkeypatch)}
            for count in (2, 6)
        )
    assert few == many
    assert len(few) >= 2  # with a block, and without


def launches_of(count: int, plans: Callable[[LLM], None], **settings: Any) -> Counter[str]:
    """Return what most steps launch on the emulated GPU, in an engine with full graphs. A step in
    which a request gets a new cache block launches more."""
    settings = {**SIZES, **ON_GPU, **GRAPHS, "max_model_len": 256, **settings}
    seen: list[Counter[str]] = []
    with engine(async_scheduling=True, **settings) as llm:
        plans(llm)
        core, worker = llm.llm_engine, worker_of(llm)
        for number in range(count):
            core.add_request(str(number), PROMPTS[number][:20], greedy(200, ignore_eos=True))
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                for name in ("execute_model", "sample_tokens"):
                    setattr(worker, name, counting(getattr(worker, name), seen, name))
            core.step()
        core.abort_request([str(number) for number in range(count)])
        for name in ("execute_model", "sample_tokens"):
            delattr(worker, name)
    (most, _), *_ = Counter(frozenset(step.items()) for step in seen).most_common()
    return Counter(dict(most))


def counting(method: Callable[..., Any], seen: list[Counter[str]], name: str) -> Callable[..., Any]:
    """Wrap a worker's method, so that what it launches is counted with its step."""

    def counted(*args: Any) -> Any:
        if name == "execute_model":
            seen.append(Counter())
        with launches_counted(seen[-1]) if seen else nullcontext():
            return method(*args)

    return counted


@cache
def native_launches(count: int) -> Counter[str]:
    """Return what a step of vLLM's own DFlash launches."""
    native = {**DFLASH, "num_speculative_tokens": 7}
    with pytest.MonkeyPatch.context() as patch:
        register()
        ours: Any = EngineArgs.create_speculative_config
        patch.setattr(EngineArgs, "create_speculative_config", ours.__wrapped__)
        restore_draft_model()
        patch.setattr(loading, "_MODEL_ARCH_BY_HASH", {})  # earlier tests' engines are kept there
        return launches_of(count, lambda _: None, speculative_config=native)


@pytest.mark.emulated
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(("length", "beyond"), [(7, 3), (0, 4)], ids=["drafted", "undrafted"])
def test_what_a_step_launches_beyond_vllms(
    count: int, length: int, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps that repeat a plan, as nearly all do: between the graphs, tokens are drawn as by
    vLLM's sampler, one kernel accepts them, and one grades. Without a block there is a graph,
    too."""

    def plans(llm: LLM) -> None:
        directed(llm, monkeypatch, lengths_in_turn(length))
        monkeypatch.setattr(scheduler_of(llm)._cadence, "is_due", lambda _: False)
        monkeypatch.setattr(scheduler_of(llm), "_update_in", 1000)

    native = native_launches(count)
    step = launches_of(count, plans, speculative_config=dict(DFLASH))
    assert step["graph"] == native["graph"] == 2
    drawing = ("_gather_draft_sampled_kernel", "_gumbel_sample_kernel", "_accept", "_grade")
    assert [step[f"kernel {name}"] for name in drawing] == [1] * 4
    assert step.total() - native.total() <= beyond, (step - native, native - step)
