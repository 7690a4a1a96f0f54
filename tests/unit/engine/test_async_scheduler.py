"""The asynchronous scheduler: what it learns from a step's output, and what it asks for."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from support.bare_scheduler import CONTEXT_TOKENS, take_vllm_out
from support.fake_time import FakeTime
from support.planner_world import profiled_costs
from vllm_dflash.engine import estimates_file
from vllm_dflash.engine.estimates_file import EstimatesFile, Memory
from vllm_dflash.engine.figures import take_figures
from vllm_dflash.engine.scheduler import DFlashAsyncScheduler, WorkerFacts, attach_facts
from vllm_dflash.planning.estimates import RANKS, Estimates
from vllm_dflash.planning.step import Step
from vllm_dflash.planning.survival import CONFIDENCE_KNOTS
from vllm_dflash.planning.uniform_length import UniformLength


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> DFlashAsyncScheduler:
    take_vllm_out(monkeypatch, 7)
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


def planned(scheduler: DFlashAsyncScheduler, num_requests: int) -> int:
    """Drafts that a step of so many requests is to make of each."""
    scheduled, _ = step({str(number): 0 for number in range(num_requests)}, {})
    scheduler._update_after_schedule(scheduled)
    return scheduled.num_spec_tokens_to_schedule


def test_what_workers_found_out_comes_with_the_first_output(
    scheduler: DFlashAsyncScheduler,
) -> None:
    """Before it, every step drafts to the full; behind it, only lengths that workers can take."""
    assert planned(scheduler, 64) == 7
    scheduled, output = step({"a": 0}, {"a": 1})
    costs = profiled_costs()
    attach_facts(output, WorkerFacts(costs, [0, 5, 7]))
    (outputs,) = scheduler.update_from_output(scheduled, output).values()
    assert isinstance(outputs, EngineCoreOutputs)
    lengths = scheduler.lengths
    assert lengths is not None
    assert lengths.costs is costs
    chosen = set()
    for accepted in (7, 6, 5, 4, 3, 2, 1, 0):
        for _ in range(100):
            lengths.observe(Step(["a"], np.array([1 + accepted]), 8, np.array([7])))
        chosen |= {planned(scheduler, size) for size in (1, 4, 8, 16, 32)}
    assert chosen == {0, 5, 7}


def test_what_was_learned_comes_with_it_and_is_kept_at_the_end(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(estimates_file, "LEAST_STEPS", 2)
    monkeypatch.setattr(AsyncScheduler, "shutdown", lambda _: None)
    seen = np.ones((7, len(CONFIDENCE_KNOTS)))
    nothing = np.zeros(2), np.zeros(RANKS)
    recalled = Estimates(profiled_costs(), seen, 0.1 * seen, *nothing)
    file = EstimatesFile(str(tmp_path), {"target": "T", "drafter": "D"})
    scheduled, output = step({"a": 0}, {"a": 1})
    attach_facts(output, WorkerFacts(recalled.costs, range(8), memory=Memory(file, recalled)))
    scheduler.shutdown()  # nothing is there to be kept
    scheduler.update_from_output(scheduled, output)
    assert scheduler.lengths is not None
    assert scheduler.lengths.survival()[0] < 0.5
    scheduler.update_from_output(*step({}, {}))  # of nobody
    scheduler.shutdown()
    assert list(tmp_path.iterdir()) == []
    scheduler.update_from_output(*step({"a": 3}, {"a": 4}))
    scheduler.shutdown()
    kept = file.read(7, 64)
    assert kept is not None
    assert kept.to_dict() == scheduler.lengths.estimates().to_dict()
    assert kept.seen.sum() == pytest.approx(seen.sum() + 3, rel=0.01)


@pytest.mark.parametrize("adapts", [True, False])
def test_steps_behind_which_vllm_drafts_nothing(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch, adapts: bool
) -> None:
    """From 0.33 on: requests in their prompts or at their ends. None is asked for one."""
    monkeypatch.setattr(UniformLength, "choose", lambda *_: pytest.fail("asked"))
    if not adapts:
        scheduler.lengths = None
    scheduled, _ = step({"a": 0, "b": 0}, {}, {"a": 60, "b": 1}, next_drafts=7)
    scheduled.skip_drafts = True
    scheduler._update_after_schedule(scheduled)
    assert scheduled.num_spec_tokens_to_schedule == 0
    counted = scheduler.statistics
    assert (counted.steps, counted.drafted_steps, counted.skipped_steps) == (1, 0, 0)


def test_learns_from_verified_drafts_alone(
    scheduler: DFlashAsyncScheduler, observed: list[Step]
) -> None:
    # A prompt chunk that samples nothing, an undrafted request, and two verified ones.
    scheduler.update_from_output(
        *step({"p": 0, "a": 0, "b": 3, "c": 3}, {"p": 0, "a": 1, "b": 4, "c": 1}, None)
    )
    (seen,) = observed
    assert (seen.verified.tolist(), seen.accepted.tolist()) == ([0, 0, 3, 3], [0, 0, 3, 0])


def test_tokens_are_found_by_name(scheduler: DFlashAsyncScheduler, observed: list[Step]) -> None:
    """The worker's batch has an order of its own."""
    scheduled, output = step({"a": 3, "b": 3}, {"b": 4, "a": 1})
    scheduler.update_from_output(scheduled, output)
    (seen,) = observed
    assert (list(seen.ids), seen.accepted.tolist()) == (["a", "b"], [0, 3])


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
    attach_facts(output, WorkerFacts(costs := profiled_costs(), range(8)))
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


def run(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch, steps: list[Any]
) -> dict[str, float]:
    """What these steps, and the one without tokens behind them, send to the front end."""
    sent: dict[str, float] = {}
    for scheduled, output in [*steps, step({}, {})]:
        outputs = EngineCoreOutputs(scheduler_stats=(stats := SchedulerStats()))
        monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda *_, o=outputs: {0: o})
        scheduler._update_after_schedule(scheduled)
        time.sleep(0.0)
        scheduler.update_from_output(scheduled, output)
        for name, more in take_figures(stats).items():
            sent[name] = sent.get(name, 0.0) + more
    return sent


def test_figures_are_counted_here_and_sent_when_the_engine_runs_dry(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    for module in ("engine.scheduler", "planning.step"):
        monkeypatch.setattr(f"vllm_dflash.{module}.time", clock)
    monkeypatch.setattr(time, "sleep", lambda _: setattr(clock, "now", clock.now + 0.05))
    policy = scheduler.lengths
    assert policy is not None
    policy.start(profiled_costs(), range(8))

    def choose(num_requests: int, context: float) -> int:
        clock.now += 0.001
        policy.speedup = 1.5
        return 2

    monkeypatch.setattr(policy, "choose", choose)
    # The first has none before it to be timed by; the others make 3 and 5 tokens.
    steps = [step({"a": 2, "b": 2}, {"a": a, "b": b}) for a, b in ((1, 1), (2, 1), (3, 2))]
    sent = run(scheduler, monkeypatch, steps)
    plain = sent.pop("plain_tokens")
    assert plain > 0
    assert sent.pop("expected_tokens") == pytest.approx(1.5 * plain)
    assert sent == pytest.approx(
        {
            "drafted_steps": 3,
            "drafted_requests": 6,
            "planned_tokens": 12,
            "produced_tokens": 8,
            "step_seconds": 2 * 0.051,
            "planning_seconds": 4 * 0.001,
        }
    )


def test_the_expected_speedup_is_that_of_the_length_chosen_last() -> None:
    policy, costs = UniformLength(7), profiled_costs()
    policy.start(costs, range(8))
    best, seconds = policy.choose(2), costs.plain(2)
    survival = policy.survival()[:best].sum()
    taken = costs.decoding(2, np.array([2 * (1 + best)]))[0] + costs.block(2 * 8)
    assert best > 0
    assert policy.speedup == pytest.approx((1 + survival) * seconds / taken)
    speedup = policy.speedup
    policy.choose(0)  # nobody is scheduled while the last of a batch is under way
    assert policy.speedup == speedup
    policy.choose(4096)
    assert policy.speedup == 1.0


def test_skipped_steps_are_counted(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UniformLength, "choose", lambda *_: 0)
    sent = run(scheduler, monkeypatch, [step({"a": 0}, {"a": 1}), step({"a": 0}, {"a": 1})])
    assert sent["skipped_steps"] == 2
    assert "drafted_steps" not in sent
    assert "drafted_requests" not in sent


def test_a_fixed_length_is_counted_without_a_planner(
    scheduler: DFlashAsyncScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.lengths = None
    sent = run(scheduler, monkeypatch, [step({"a": 7, "b": 7}, {"a": 1, "b": 8}, next_drafts=7)])
    assert sent == {"drafted_steps": 1, "drafted_requests": 2, "planned_tokens": 14}


def test_lengths_are_chosen_and_steps_judged_by_their_contexts(
    scheduler: DFlashAsyncScheduler, observed: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request that was aborted while its step ran, nothing is known any more."""
    asked: list[tuple[int, float]] = []
    monkeypatch.setattr(UniformLength, "choose", lambda _, *what: asked.append(what) or 0)
    planned(scheduler, 3)
    assert asked == [(3, 3.0 * CONTEXT_TOKENS)]
    requests = {"b": SimpleNamespace(num_computed_tokens=7)}
    monkeypatch.setattr(AsyncScheduler, "requests", requests)
    scheduler.update_from_output(*step({"a": 0, "b": 0}, {"a": 1, "b": 1}))
    assert observed[0].context_lens.tolist() == [0, 7]
