"""Schedulers of the simulated pipeline: blocks of fixed lengths, and ours: the real `V2Scheduler`,
its cadence and its repeated plans included, with nothing of vLLM's below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from support.bare_scheduler import request, take_vllm_out
from support.fake_time import FakeTime
from support.simulated_device import Verified
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.v2 import v2_scheduler
from vllm_dflash.engine.v2.exchange import OUTCOMES, WorkerFacts, plan_of
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.engine.v2.v2_scheduler import V2Scheduler
from vllm_dflash.planning import Bools, Ints, step
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import NO_DRAFTS

MAX_LEN = 1 << 20
PLANNING_MS = 0.5
"""Time of a plan, as the scheduler measures it. It takes none of the simulated steps' time."""


class Ahead(NamedTuple):
    """What a step drafts, for the next one to verify."""

    lengths: Ints
    """Draft slots of each request, [R]."""
    runs_block: bool


class Scheduled(NamedTuple):
    """A step as it goes to the device."""

    names: list[str]
    is_fresh: Bools
    """Whether each request has just arrived, [R]."""
    others: Ints
    """Rows of each request that are not drafts, [R]."""
    given: Ints
    """Draft slots of each request, [R]."""
    context: Ints
    """Context tokens of each request, [R]."""


@dataclass
class Fixed:
    """Always drafts blocks of the same lengths."""

    length: int | Sequence[int]
    """Drafts of all requests, or of each slot."""

    @property
    def may_draft(self) -> bool:
        return bool(np.any(self.length))

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def schedule(self, scheduled: Scheduled) -> Ahead:
        lengths = np.zeros(len(scheduled.names), np.int64) + np.array(self.length)
        return Ahead(lengths, self.may_draft)

    def update(self, scheduled: Scheduled, verified: Verified) -> None: ...


class PlanningTime:
    """`time` of a scheduler: each of its plans takes `PLANNING_MS`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += PLANNING_MS / 1000
        return self.now


class Ours:
    """Drives a `V2Scheduler` whose workers have sent these facts."""

    may_draft = True

    def __init__(
        self, costs: StepCosts, lengths: Sequence[int], ragged_seconds: float, clock: FakeTime
    ) -> None:
        self._clock, self._planning = clock, PlanningTime()
        self._plans: list[Any] = []
        with self.running():
            self.scheduler: Any = V2Scheduler()
        self.scheduler.requests = {}
        self.scheduler._start(WorkerFacts(costs, lengths, ragged_seconds))
        self.planner = self.scheduler.planner

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace vLLM's schedulers, and time, in a `with` block."""
        with pytest.MonkeyPatch.context() as patch:
            take_vllm_out(patch, plans_every_step=False, max_len=MAX_LEN)
            for module in (step_clock, step):
                patch.setattr(module, "time", self._clock)
            patch.setattr(v2_scheduler, "time", self._planning)
            yield

    def schedule(self, scheduled: Scheduled) -> Ahead:
        names, rows = scheduled.names, scheduled.others + scheduled.given
        computed = scheduled.context + 1 - scheduled.others
        self.scheduler.requests = {
            name: request(int(before), left=MAX_LEN)
            for name, before in zip(names, computed, strict=True)
        }
        for name, tokens in zip(names, scheduled.context, strict=True):
            self.scheduler.requests[name].num_tokens = int(tokens) + 1
        output = SimpleNamespace(
            num_scheduled_tokens=dict(zip(names, rows.tolist(), strict=True)),
            total_num_scheduled_tokens=int(rows.sum()),
            scheduled_spec_decode_tokens={
                name: [-1] * count
                for name, count in zip(names, scheduled.given.tolist(), strict=True)
                if count
            },
            num_spec_tokens_to_schedule=0,
            scheduled_new_reqs=[],
            finished_req_ids=set(),
        )
        self.scheduler._update_after_schedule(output)
        self._plans.append(output)
        plan = plan_of(output)
        lengths = plan.lengths or dict.fromkeys(names, plan.length)
        return Ahead(np.array([lengths[name] for name in names]), plan.runs_block)

    def update(self, scheduled: Scheduled, verified: Verified) -> None:
        output = self._plans.pop(0)
        names, outcomes = scheduled.names, verified.outcomes
        source = np.where(scheduled.is_fresh, NO_DRAFTS, outcomes.source)
        fields = outcomes._replace(source=source)._asdict()
        confidence = fields.pop("confidence")
        table = np.zeros((len(names), OUTCOME_COLUMNS + confidence.shape[1]))
        fields.pop("tokens_if_truncated")
        table[:, : len(fields)] = np.column_stack([*fields.values()])
        table[:, OUTCOME_COLUMNS:] = confidence
        sampled = SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[0] * count for count in verified.produced.tolist()],
        )
        if plan_of(output).reports:
            OUTCOMES.attach(sampled, table)
        self.scheduler.update_from_output(output, sampled)
