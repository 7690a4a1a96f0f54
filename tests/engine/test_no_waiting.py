"""A warm asynchronous step on V2: the worker waits for nothing and does the same for any batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from vllm import LLM

from support.engines import DFLASH, engine, greedy, held_out_prompts, worker_of
from support.waiting_calls import lines_counted, waits_noted
from vllm_dflash.engine.watch import FIRST_LOOK
from vllm_dflash.engine.worker import DraftingWorker

pytestmark = [
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
    pytest.mark.usefixtures("runner"),
]
PROMPTS = held_out_prompts(6)
WARM_UP, STEPS = 4, 6
Watch = Callable[[Counter[str]], AbstractContextManager[None]]


def warm_steps(
    llm: LLM, count: int, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> list[Counter[str]]:
    """What was seen in each of the worker's steps of so many requests that all decode."""
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


@pytest.fixture(scope="module")
def llm() -> Any:
    """Lengths take turns, so that steps with and without a block are among those watched."""
    with (
        pytest.MonkeyPatch.context() as patch,
        engine("asynchronous", speculative_config=dict(DFLASH), max_num_seqs=6) as llm,
    ):
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        lengths = iter([7, 7, 0, 3] * 1000)
        patch.setattr(scheduler.lengths, "choose", lambda *_: next(lengths))
        yield llm


def test_nothing_waits_for_the_device(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = worker_of(llm)._watch
    watch._steps_left = WARM_UP + 2
    seen = warm_steps(llm, 3, waits_noted, monkeypatch)
    assert watch._interval > FIRST_LOOK  # it has looked at what the device counts
    assert len(seen) >= STEPS
    assert sum(seen, Counter()) == Counter()


def test_steps_of_more_requests_run_no_more_lines(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ours, in Python: there is no loop over requests."""
    monkeypatch.setattr(worker_of(llm), "_watch", None)  # it looks now and then
    monkeypatch.setattr(worker_of(llm), "_log", None)
    few = warm_steps(llm, 2, lines_counted, monkeypatch)
    many = warm_steps(llm, 6, lines_counted, monkeypatch)
    kinds = [{frozenset(step.items()) for step in steps} for steps in (few, many)]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) >= 2  # with a block, and without
