"""The asynchronous scheduler: what it learns from a step's output, and what it asks for."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from support.planner_world import profiled_costs
from vllm_dflash.engine import scheduler as ours
from vllm_dflash.engine.scheduler import DFlashAsyncScheduler, attach_costs
from vllm_dflash.planning.uniform_length import UniformLength


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> DFlashAsyncScheduler:
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self: None)
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda *_: "outputs")
    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", lambda *_: None)
    monkeypatch.setattr(
        ours.DFlashOptions, "of", lambda _: SimpleNamespace(draft_length="adaptive")
    )
    monkeypatch.setattr(AsyncScheduler, "num_spec_tokens", 7, raising=False)
    monkeypatch.setattr(AsyncScheduler, "dynamic_sd_lookup", [0, 7, 4, 2, 0], raising=False)
    config = SimpleNamespace(speculative_config=SimpleNamespace(enable_adaptive_verification=False))
    monkeypatch.setattr(AsyncScheduler, "vllm_config", config, raising=False)
    return DFlashAsyncScheduler()


def step(
    drafts: dict[str, int], produced: dict[str, int], rows: dict[str, int] | None = None
) -> Any:
    """A scheduled step and its output: drafts verified, and tokens each request got."""
    scheduled = SimpleNamespace(
        num_scheduled_tokens=rows or {name: 1 + k for name, k in drafts.items()},
        scheduled_spec_decode_tokens={name: [-1] * k for name, k in drafts.items() if k},
        num_spec_tokens_to_schedule=0,
    )
    output = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(produced)},
        sampled_token_ids=[[5] * count for count in produced.values()],
    )
    return scheduled, output


def test_chooses_among_captured_lengths_whatever_the_batch_size(
    scheduler: DFlashAsyncScheduler,
) -> None:
    assert scheduler.lengths is not None
    assert scheduler.lengths._choices.tolist() == [0, 2, 4, 7]
    scheduled, _ = step({"a": 0, "b": 0, "c": 0, "d": 0}, {})
    scheduler._update_after_schedule(scheduled)
    assert scheduled.num_spec_tokens_to_schedule == 7  # not what stands in the table for four


def test_costs_come_with_the_first_output(scheduler: DFlashAsyncScheduler) -> None:
    scheduled, output = step({"a": 0}, {"a": 1})
    costs = profiled_costs()
    attach_costs(output, costs)
    assert scheduler.update_from_output(scheduled, output) == "outputs"
    assert scheduler.lengths is not None
    assert scheduler.lengths.costs is costs


def test_learns_from_verified_drafts_alone(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(
        UniformLength,
        "observe_verification",
        lambda self, drafted, accepted: seen.append((drafted.tolist(), accepted.tolist())),
    )
    # A prompt chunk that samples nothing, an undrafted request, and two verified ones.
    scheduler.update_from_output(
        *step({"p": 0, "a": 0, "b": 3, "c": 3}, {"p": 0, "a": 1, "b": 4, "c": 1}, None)
    )
    assert seen == [([3, 3], [3, 0])]


def test_steps_are_timed_where_the_same_requests_only_decode(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(
        UniformLength,
        "observe_step",
        lambda self, requests, tokens, length, seconds: timed.append((requests, tokens)),
    )
    decode = step({"a": 3, "b": 3}, {"a": 2, "b": 1})
    for one in (
        decode,  # nothing before it to time it by
        decode,
        step({"a": 3, "b": 3, "p": 0}, {"a": 1, "b": 1, "p": 0}, {"a": 4, "b": 4, "p": 60}),
        decode,  # the time since the prompt's step is this one's
        decode,
    ):
        scheduler.update_from_output(*one)
    assert timed == [(2, 8)] * 3
