"""V2's schedulers: what they learn from a step's output."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutputs

from support.bare_scheduler import CONTEXT_TOKENS, bare, plan_always, schedule, step
from support.planner_world import profiled_costs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.v2.exchange import FACTS, OUTCOMES, WorkerFacts, plan_of
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, Outcomes, StepRecord


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepRecord, Outcomes | None]]:
    """Steps that a started planner learns from, each with the outcomes of its drafts."""
    seen: list[tuple[StepRecord, Outcomes | None]] = []
    learned: list[tuple[StepRecord, Outcomes]] = []

    def observe(_: Planner, step: StepRecord) -> None:
        of_step = [outcomes for one, outcomes in learned if one is step]
        seen.append((step, of_step[0] if of_step else None))

    started = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(Planner, "is_started", started, raising=False)
    monkeypatch.setattr(Planner, "learn_outcomes", lambda _, *what: learned.append(what))
    monkeypatch.setattr(Planner, "record_step", observe)
    return seen


def test_what_workers_found_out_comes_with_the_first_output(scheduler: Any) -> None:
    scheduled, output = step({"a": 0}, {"a": 1})
    FACTS.attach(output, facts := WorkerFacts(profiled_costs(), [0, 5, 7], ragged_seconds=2.0))
    (outputs,) = scheduler.update_from_output(scheduled, output).values()
    assert isinstance(outputs, EngineCoreOutputs)
    assert scheduler.planner.costs is facts.costs
    alike, ragged = scheduler.planner.seconds(np.array([[5, 5], [5, 4]]), np.array([9, 9]))
    assert ragged > alike + 1.9


@pytest.mark.parametrize(
    ("drafts", "produced", "more", "rows", "verified", "source"),
    [
        # Beside a chunk of a prompt that samples nothing, and an undrafted request. The worker's
        # batch has an order of its own.
        (
            {"p": 0, "a": 0, "b": 3, "c": 2},
            {"b": 4, "p": 0, "c": 1, "a": 1},
            {},
            4 + 3 + 2,
            [0, 0, 3, 2],
            [NO_DRAFTS, NO_DRAFTS, BLOCK, BLOCK],
        ),
        # Placeholders of requests that were just admitted: all rejected, and they take time.
        (
            {"o": 7, "n": 7},
            {"o": 3, "n": 1},
            {"placeholders": "n"},
            2 * 8,
            [7, 7],
            [BLOCK, NO_DRAFTS],
        ),
        # Five of the 2 x 7 were admitted, with vLLM's adaptive verification.
        (
            {"a": 7, "b": 7, "p": 0},
            {"a": 2, "b": 1, "p": 0},
            {"rows": {"a": 8, "b": 8, "p": 60}, "admitted": {"a": 4, "b": 1}},
            60 + 2 + 5,
            [4, 1, 0],
            [BLOCK, BLOCK, NO_DRAFTS],
        ),
        # Placeholders that fill its budget are rows.
        (
            {"a": 7, "b": 7},
            {"a": 2, "b": 1},
            {"admitted": {"a": 4, "b": 3}, "placeholders": "b"},
            2 + 4 + 3,
            [4, 3],
            [BLOCK, NO_DRAFTS],
        ),
    ],
    ids=["an order of its own", "placeholders", "adaptive verification", "both"],
)
def test_learns_from_what_the_device_verified(
    scheduler: Any,
    observed: list[Any],
    drafts: dict[str, int],
    produced: dict[str, int],
    more: dict[str, Any],
    rows: int,
    verified: list[int],
    source: list[int],
) -> None:
    scheduler.update_from_output(*step(drafts, produced, **more))
    ((seen, outcomes),) = observed
    assert list(seen.ids) == [*drafts]
    assert seen.produced.tolist() == [produced[name] for name in drafts]
    assert (seen.rows, seen.verified.tolist()) == (rows, verified)
    assert (outcomes.admitted.tolist(), outcomes.source.tolist()) == (verified, source)


@pytest.mark.parametrize("block_rows", [8, 7])
def test_a_block_takes_part_of_the_time_of_the_step_behind_it(
    monkeypatch: pytest.MonkeyPatch, observed: list[Any], block_rows: int
) -> None:
    """vLLM returns a step's tokens before it drafts, so the next output waits for the block."""
    scheduler = bare(monkeypatch, block_rows=block_rows)
    for drafts, next_drafts in ((0, 3), (3, 0), (0, 0)):
        scheduler.update_from_output(
            *step({"a": drafts, "b": drafts}, {"a": 1, "b": 1}, next_drafts=next_drafts)
        )
    assert [seen.draft_rows for seen, _ in observed] == [0, 2 * block_rows, 0]


def test_steps_are_judged_by_their_contexts(
    scheduler: Any, observed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context of a request that ended while its step ran, as most do in asynchronous steps, is
    no longer known, and the step's time would be attributed to something else."""
    asked = plan_always(monkeypatch, 0, 0, 0)
    schedule(scheduler, *"abc")
    assert asked[0][1].tolist() == [CONTEXT_TOKENS + 1] * 3
    both = {name: SimpleNamespace(num_computed_tokens=7) for name in "ab"}
    for requests in (both, both, {"b": both["b"]}, both):
        scheduler.requests = requests
        scheduler.update_from_output(*step({"a": 0, "b": 0}, {"a": 1, "b": 1}))
    assert observed[2][0].context_lens.tolist() == [0, 7]
    timed = [seen.target_seconds > 0.0 for seen, _ in observed]
    assert timed == [False, True, False, True]  # there was no step before the first


def test_what_became_of_trees_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each size up to the tree's own. The device reports in an order of its own."""
    scheduler = bare(monkeypatch, tree_nodes=31)
    scheduled, output = step({"a": 15, "b": 15}, {"b": 3, "a": 5})
    table = np.zeros((2, 8 + 3 + 7))
    table[:, 0], table[:, 1] = BLOCK, 15
    table[:, 6], table[:, 7] = [4, 5], [1, 3]  # of the most likely chains
    table[1, 8:11] = 4, 5, 5  # the other request had no tree
    OUTCOMES.attach(output, table)
    scheduler.update_from_output(scheduled, output)
    assert scheduler._trees.gain._trees.tolist() == [3, 4, 0]
    assert scheduler._trees.gain._chains.tolist() == [3, 3, 0]


# --- steps that repeat a plan ---------------------------------------------------------------------


def test_the_step_that_was_planned_is_learned_from(
    monkeypatch: pytest.MonkeyPatch, observed: list[Any]
) -> None:
    """Not the one whose output comes next: an asynchronous scheduler is a step ahead. What a step
    took is known if the output before it was seen as well."""
    scheduler = bare(monkeypatch, plans_every_step=False)
    asked = plan_always(monkeypatch, 3, 3)
    due = [False, True, False, False, True, False]
    monkeypatch.setattr(Cadence, "is_due", lambda *_: due.pop(0))
    scheduler._cache.keep(["a"], np.array([3]), np.array([4]), runs_block=True)
    waiting, plans = [], []
    for number in range(6):
        scheduled, output = step({"a": 3, "b": 3}, {"a": 1 + number % 3, "b": 1})
        scheduler._update_after_schedule(scheduled)
        plans.append(plan_of(scheduled))
        waiting.append((scheduled, output))
        if number:
            scheduler.update_from_output(*waiting.pop(0))
    scheduler.update_from_output(*waiting.pop(0))
    assert [(plan.runs_block, plan.length) for plan in plans] == [(True, 3)] * 6
    assert len(asked) == 2
    assert [seen.produced[0] for seen, _ in observed] == [1 + 1, 1 + 4 % 3]
    assert all(seen.target_seconds > 0.0 for seen, _ in observed)
    assert [seen.draft_rows for seen, _ in observed] == [16, 16]
