"""A warm step on V2: the worker waits for nothing and does the same for any batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from support.device_decisions import directed
from support.engines import (
    DFLASH,
    engine,
    greedy,
    held_out_prompts,
    proposer_of,
    scheduler_of,
    worker_of,
)
from support.interpreter import triton_attention
from support.step_counts import COPY, launches_counted, lines_counted, waits_noted
from support.trimming import trimming
from vllm_dflash.engine.v2 import trimming as trimming_module
from vllm_dflash.engine.worker import DraftingWorker
from vllm_dflash.planning.ahead import PlanAhead

pytestmark = pytest.mark.v2
PROMPTS = [text[:80] for text in held_out_prompts(6)]
WARM_UP, STEPS = 4, 8
Watch = Callable[[Counter[str]], AbstractContextManager[None]]


def warm_steps(
    llm: LLM, count: int, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> list[Counter[str]]:
    """Return what was seen in each of the worker's steps, of `count` requests that all decode."""
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
                with watch(seen[-1]):
                    return original(self, *args)

            patch.setattr(DraftingWorker, name, watched)
        for _ in range(STEPS):
            core.step()
    core.abort_request([str(number) for number in range(count)])
    while core.has_unfinished_requests():
        core.step()
    return seen


CHAINS = ["asynchronous", "synchronous", "trimming"]


@pytest.fixture(scope="module")
def llm(request: pytest.FixtureRequest) -> Any:
    """An engine with free drafts. Lengths take turns, so that some watched steps have a block, some
    have none, and in some the requests have different lengths."""
    way = "synchronous" if request.param == "synchronous" else "asynchronous"
    around = {"trimming": lambda: trimming(with_kernel=False), "trees": triton_attention}
    speculative: dict[str, Any] = dict(DFLASH)
    if request.param == "trees":
        speculative["draft_tree"] = 9
    with (
        pytest.MonkeyPatch.context() as patch,
        around.get(request.param, nullcontext)(),
        engine(way, speculative_config=speculative, max_num_seqs=6) as llm,
    ):
        trees = proposer_of(llm).trees
        assert (trees is not None and trees.is_attached) == (request.param == "trees")
        assert proposer_of(llm).device_step.free_drafts is not None
        kinds = cycle(
            [
                lambda most: PlanAhead(most, True),
                lambda most: PlanAhead(np.minimum(most, 3), False),
                lambda most: PlanAhead(np.zeros_like(most)),
                lambda most: PlanAhead(np.minimum(most, np.arange(len(most)) % 3), True),
            ]
        )
        directed(llm, patch, lambda most: next(kinds)(most))
        yield llm


@pytest.mark.parametrize(
    "llm", [*CHAINS, pytest.param("trees", marks=pytest.mark.slow)], indirect=True
)
def test_nothing_waits_for_the_device(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler_of(llm)._news_in = WARM_UP + 2  # rates and costs are sent meanwhile
    seen = warm_steps(llm, 3, waits_noted, monkeypatch)
    assert len(seen) >= STEPS
    assert sum(seen, Counter()) == Counter()


@pytest.mark.parametrize(
    "llm",
    ["trimming", *(pytest.param(way, marks=pytest.mark.slow) for way in (*CHAINS[:-1], "trees"))],
    indirect=True,
)
def test_steps_of_more_requests_run_no_more_lines(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own part of a step in Python: it has no loop over requests."""
    monkeypatch.setattr(worker_of(llm), "_ticking", ())  # these act now and then
    monkeypatch.setattr(scheduler_of(llm), "_news_in", 1000)  # nor is anything sent
    few = warm_steps(llm, 2, lines_counted, monkeypatch)
    many = warm_steps(llm, 6, lines_counted, monkeypatch)
    kinds = [{frozenset(step.items()) for step in steps} for steps in (few, many)]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) >= 2  # with a block, and without


@pytest.mark.parametrize("llm", ["asynchronous", "trimming"], indirect=True)
def test_what_a_step_launches_beyond_vllms(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device trims, chances are kept and sent, and a budget is split: here one draft fewer
    than there are. A GPU is also sent that number."""
    monkeypatch.setattr(scheduler_of(llm), "_news_in", 1000)
    monkeypatch.setattr(trimming_module, "best_budget", lambda *what, **_: max(what[4] - 1, 0))
    steps = warm_steps(llm, 3, launches_counted, monkeypatch)
    kernels = ["_grade", "_learn_overall", "_scan", "_predict", "_choose"]
    expected = Counter({f"kernel {name}": 1 for name in kernels} | {COPY: 1})
    if proposer_of(llm).budget is not None:
        expected += Counter({"aten::index_put_": 1, "kernel _split": 1, COPY: 1})
        steps = [step for step in steps if step["kernel _split"]]  # those with drafts to verify
    assert steps
    assert all(step == expected for step in steps)
