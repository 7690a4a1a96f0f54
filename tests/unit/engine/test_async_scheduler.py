"""The asynchronous scheduler: what it learns from a step's output, and what it asks for."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from support.planner_world import profiled_costs
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.scheduler import DFlashAsyncScheduler, attach_costs
from vllm_dflash.planning.step import Step
from vllm_dflash.planning.uniform_length import UniformLength


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> DFlashAsyncScheduler:
    monkeypatch.setattr(AsyncScheduler, "__init__", lambda self: None)
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda *_: "outputs")
    monkeypatch.setattr(AsyncScheduler, "_update_after_schedule", lambda *_: None)
    monkeypatch.setattr(DFlashOptions, "of", lambda _: SimpleNamespace(draft_length="adaptive"))
    monkeypatch.setattr(AsyncScheduler, "num_spec_tokens", 7, raising=False)
    monkeypatch.setattr(AsyncScheduler, "dynamic_sd_lookup", [0, 7, 4, 2, 0], raising=False)
    config = SimpleNamespace(speculative_config=SimpleNamespace(enable_adaptive_verification=False))
    monkeypatch.setattr(AsyncScheduler, "vllm_config", config, raising=False)
    return DFlashAsyncScheduler()


def step(
    drafts: dict[str, int],
    produced: dict[str, int],
    rows: dict[str, int] | None = None,
    *,
    new: tuple[str, ...] = (),
    resumed: tuple[str, ...] = (),
    next_drafts: int = 0,
) -> Any:
    """A scheduled step and its output: drafts verified, and tokens each request got."""
    rows = rows or {name: 1 + k for name, k in drafts.items()}
    scheduled = SimpleNamespace(
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        scheduled_spec_decode_tokens={name: [-1] * k for name, k in drafts.items() if k},
        num_spec_tokens_to_schedule=next_drafts,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumed)),
    )
    output = SimpleNamespace(
        req_id_to_index={name: i for i, name in enumerate(produced)},
        sampled_token_ids=[[5] * count for count in produced.values()],
    )
    return scheduled, output


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The steps that the policy learns from."""
    steps: list[Step] = []
    monkeypatch.setattr(UniformLength, "observe", lambda self, step: steps.append(step))
    return steps


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
    scheduler: DFlashAsyncScheduler, observed: list[Step]
) -> None:
    # A prompt chunk that samples nothing, an undrafted request, and two verified ones.
    scheduler.update_from_output(
        *step({"p": 0, "a": 0, "b": 3, "c": 3}, {"p": 0, "a": 1, "b": 4, "c": 1}, None)
    )
    (seen,) = observed
    assert (seen.verified.tolist(), seen.accepted.tolist()) == ([0, 0, 3, 3], [0, 0, 3, 0])


def test_padding_of_requests_that_were_just_admitted_is_no_draft(
    scheduler: DFlashAsyncScheduler,
) -> None:
    """vLLM gives them as many placeholders as others have drafts; all come out rejected."""
    lengths = scheduler.lengths
    assert lengths is not None
    before = lengths.survival().tolist()
    scheduler.update_from_output(
        *step({"n": 7, "r": 7}, {"n": 1, "r": 1}, new=("n",), resumed=("r",))
    )
    assert lengths.survival().tolist() == before
    scheduler.update_from_output(*step({"n": 7, "r": 7}, {"n": 1, "r": 1}))
    assert lengths.survival()[0] < before[0]


def test_steps_are_timed_where_the_same_requests_only_decode(
    scheduler: DFlashAsyncScheduler, observed: list[Step]
) -> None:
    decode = step({"a": 3, "b": 3}, {"a": 2, "b": 1})
    for one in (
        decode,  # nothing before it to time it by
        decode,
        step({"a": 3, "b": 3, "p": 0}, {"a": 1, "b": 1, "p": 0}, {"a": 4, "b": 4, "p": 60}),
        decode,  # the time since the prompt's step is this one's
        decode,
    ):
        scheduler.update_from_output(*one)
    assert [seen.rows for seen in observed if seen.target_seconds] == [8] * 3
    assert [bool(seen.target_seconds) for seen in observed] == [False, True, False, True, True]


def test_steps_of_nobody_teach_nothing(scheduler: DFlashAsyncScheduler) -> None:
    """Behind a request of one token, before any that decoded: nothing to learn a time from."""
    first, output = step({"a": 0}, {"a": 1}, {"a": 9}, new=("a",))
    attach_costs(output, costs := profiled_costs())
    before = costs.verify.seconds.tolist()
    for one in ((first, output), step({}, {}), step({}, {}), step({}, {})):
        scheduler.update_from_output(*one)
    assert costs.verify.seconds.tolist() == before


def test_a_draft_takes_part_of_the_time_of_the_step_behind_it(
    scheduler: DFlashAsyncScheduler, observed: list[Step]
) -> None:
    """vLLM hands a step's tokens over before it drafts, so the next output waits for the draft."""
    for drafts, next_drafts in ((0, 3), (3, 0), (0, 0)):
        scheduler.update_from_output(
            *step({"a": drafts, "b": drafts}, {"a": 1, "b": 1}, next_drafts=next_drafts)
        )
    assert [seen.draft_rows for seen in observed] == [0, 2 * 8, 0]
