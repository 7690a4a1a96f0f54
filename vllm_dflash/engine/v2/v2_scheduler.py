"""Schedulers for Model Runner V2, synchronous or not.

The device decides what each request's drafts are (`speculator.py`). When a step is scheduled, its
plan (`StepPlan`) says for all ranks whether a block runs, and how many drafts of each request the
step after it verifies. Planning takes as long as a step of a fast GPU, so most steps repeat the
last plan (`plan_cache.py`). Only outputs of steps with a new plan are learned from
(docs/engineering/architecture.md has the path of a length).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.engine_options import TREE_CUTS, EngineOptions
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.own_limits import OwnLimits
from vllm_dflash.engine.reporting.figures import CountingScheduler
from vllm_dflash.engine.reporting.log import PeriodicLog
from vllm_dflash.engine.scheduler_output import never_drafts, room_for_blocks
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v2.exchange import (
    CHAINS_ONLY,
    COUNTED,
    FACTS,
    OUTCOMES,
    PLAN,
    StepPlan,
    WorkerFacts,
    plan_of,
    verified_drafts,
)
from vllm_dflash.engine.v2.plan_cache import PlanCache, lens_after
from vllm_dflash.engine.v2.trees.tree_planning import TreePlanner
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler
from vllm_dflash.planning import Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Outcomes, StepRecord

UPDATE_STEPS = 32
"""Steps between two updates of what workers report for the scheduler."""


class V2Scheduler(SessionScheduler, CountingScheduler):
    """Synchronous scheduler for V2: schedules a step once the last one's tokens are known."""

    vllm_config: VllmConfig
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = EngineOptions.from_config(self.vllm_config)
        width = self._width = options.draft_width
        self._block_rows = options.block_rows
        self.vllm_config = room_for_blocks(self.vllm_config)
        schedule = self.vllm_config.scheduler_config
        # vLLM 0.33 admits as many requests as a step has room for blocks, and assumes blocks as
        # long as the maximum number of drafts. With trees, blocks are shorter.
        most = max(self.max_num_active_reqs, schedule.max_num_batched_tokens // (1 + width))
        self.max_num_active_reqs = min(most, options.most_active or schedule.max_num_seqs)
        self.planner = Planner(width, schedule.max_num_seqs)
        """Started by the workers' facts, unless draft lengths are fixed."""
        nodes, rows = options.tree_nodes, self.max_num_scheduled_tokens
        self._trees = TreePlanner(nodes, self.planner, self.vllm_config, rows)
        self._is_fixed = not options.is_planned
        own = drafted_length(self.vllm_config.speculative_config.draft_model_config)
        self._longest = min(own, self.max_model_len)
        """Maximum length of a request that can use drafts, in tokens."""
        self._log = PeriodicLog(self.statistics, envs.VLLM_LOG_STATS_INTERVAL)
        self._clock, self._cadence = StepClock(), Cadence()
        self._own_limits = OwnLimits()
        self._cache = PlanCache(self.num_spec_tokens)
        self._drops_drafts = self.vllm_config.speculative_config.enable_adaptive_verification
        self._plan = StepPlan()
        """Plan of the step that was scheduled last."""
        self._planning_seconds = 0.0
        """Time spent on the last new plan."""
        self._last_block_rows = 0
        """Rows of the last finished step's block, whose time is part of the next step's."""
        self._steps_unlearned = 0
        """Steps since an output was last learned from."""
        self._update_in = UPDATE_STEPS

    # --- scheduling a step ------------------------------------------------------------------

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self._own_limits.take(scheduler_output):
            self._cache.expire()  # a session's next turn may have another limit
        if count := len(scheduler_output.num_scheduled_tokens):
            started = time.perf_counter()
            plan = self._plan = self._with_report(self._plan_step(scheduler_output))
            PLAN.attach(scheduler_output, plan)
            scheduler_output.num_spec_tokens_to_schedule = plan.length
            seconds = time.perf_counter() - started
            self.statistics.planning_seconds += seconds
            if plan.is_new and not never_drafts(scheduler_output):
                self._planning_seconds = seconds
            self._count(plan, count)
        super()._update_after_schedule(scheduler_output)
        if count and self.vllm_config.scheduler_config.async_scheduling:
            self._cut_drafts()

    def _plan_step(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Plan a step, or repeat the last plan."""
        scheduled, cache = scheduler_output.num_scheduled_tokens, self._cache
        is_due = self._cadence.is_due(len(scheduled))
        if never_drafts(scheduler_output) or self._own_limits.forbid_all(scheduled):
            # Charge nothing for it, and spend no probe on it.
            cache.expire()
            return StepPlan(any_eligible=False, is_new=is_due)
        is_new = is_due or not cache
        if not is_new and (unchanged := cache.unchanged(scheduled)):
            return unchanged
        cache.expire()
        names = list(scheduled)
        context, left = lens_after(scheduled, self.requests)
        ends = np.full(len(names), self._longest)
        chains = draft_limits(context, ends, self._width, np.ones(len(names), bool))
        chains = self._own_limits.cut(chains, names)
        limits = self._trees.limits(chains, names, self.requests, context, ends)
        most_left = int(left.max())
        if self._own_limits:
            most_left = int(left[[self._own_limits.get(name) != 0 for name in names]].max())
        # Drafts take three more tokens: this step's, a draft, and the bonus token after it. With
        # fixed lengths, there are K after every step.
        any_eligible = self._is_fixed or most_left > 2
        if not is_new:
            lengths, runs_block = cache.lengths(names, limits), cache.runs_block
        elif any_eligible:
            lengths, runs_block = self._plan_anew(names, context, chains, limits)
        else:
            lengths, runs_block = np.zeros_like(limits), False
        each = dict(zip(names, lengths.tolist(), strict=True))
        plan = StepPlan.from_lengths(
            each, runs_block=runs_block, any_eligible=any_eligible, is_new=is_new
        )
        if not is_new and (left >= 0).all():  # no request is in its prompt
            room = self._longest - 2 - self.num_spec_tokens - int(context.max())
            cache.hold(plan, scheduled, room if self._is_fixed else min(room, most_left - 3))
        return plan

    def _plan_anew(
        self, names: list[str], context: Ints, chains: Ints, limits: Ints
    ) -> tuple[Ints, bool]:
        """Plan a step of R requests. Returns the drafts of each, and whether a block runs.

        Args:
            names: ids of the requests, [R].
            context: tokens of context of each, [R].
            chains: most drafts that each can use in a chain, [R].
            limits: most drafts that each can use, [R].
        """
        steps = self._cadence.take_steps_since_plan()
        ahead = self.planner.plan(names, context, chains, steps=steps)
        lengths = self._trees.lengths(ahead, limits, names, self.requests, context)
        if ahead.is_probe:
            self.statistics.probes += ahead.runs_block
            self._cadence.observe_next_steps()
        else:
            self._cache.keep(names, lengths, limits, runs_block=ahead.runs_block)
        return lengths, ahead.runs_block

    def _with_report(self, plan: StepPlan) -> StepPlan:
        """Add what workers report, and what they are told."""
        last = self._plan
        # Only a report says how many drafts were verified: of texts, which may predict nothing, or
        # if vLLM drops some.
        reports = plan.is_new or (last.length > 0 and not last.runs_block) or self._drops_drafts
        return plan._replace(reports=reports, counted=self._counted_for_workers())

    def _count(self, plan: StepPlan, count: int) -> None:
        """Count the draft lengths of a step of `count` requests."""
        blocks = plan.each_length(count) if plan.runs_block else []
        self.statistics.record_blocks(blocks, any_eligible=plan.any_eligible)

    def _counted_for_workers(self) -> dict[str, Any] | None:
        """What workers are told, if it is time."""
        self._update_in -= 1
        if self._update_in > 0:
            return None
        self._update_in = UPDATE_STEPS
        return self.statistics.scheduler_counters()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Cut drafts to their lengths. Called by vLLM if scheduling is synchronous."""
        super().update_draft_token_ids(draft_token_ids)
        self._cut_drafts()

    def _cut_drafts(self) -> None:
        """Cut each request's drafts, or vLLM's placeholders for them, to its own length."""
        for name, length in (self._plan.lengths or {}).items():
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[:length]

    def _context_lens(self, names: list[str]) -> Ints:
        """Tokens of context of each request of a step, as far as known by now, [R]."""
        requests = [self.requests.get(name) for name in names]
        lens = [request.num_computed_tokens if request else 0 for request in requests]
        return np.array(lens, dtype=np.int64)  # 0 if it has ended or was aborted meanwhile

    # --- the output of a step -----------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, and learn from them and from the time they took."""
        if CHAINS_ONLY.on(model_runner_output):
            self._trees.num_nodes = 0
        counts = COUNTED.on(model_runner_output)
        if counts is not None:
            self.statistics.take_counts(counts)
        facts = FACTS.on(model_runner_output)
        if facts is not None:
            self._start(facts)
        self._record_step(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens and self.planner.is_started:
            self._log.tick()
        return outputs

    def _start(self, facts: WorkerFacts) -> None:
        self.planner.start(facts.costs, facts.lengths, ragged_seconds=facts.ragged_seconds)

    def _record_step(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        plan, table = plan_of(scheduler_output), OUTCOMES.on(output)
        # Use the scheduler's order, which is stable while the batch is; the worker puts requests
        # with most drafts first.
        names = list(scheduler_output.num_scheduled_tokens)
        counted = None
        if table is not None:
            order = [output.req_id_to_index[name] for name in names]
            table = table[order]
            counted = dict(zip(names, verified_drafts(table), strict=True))
        self.count_drafts(counted)
        draft_rows = self._last_block_rows
        self._last_block_rows = plan.runs_block * len(names) * self._block_rows
        self._steps_unlearned += 1
        if not plan.is_new:
            self.statistics.step_seconds += self._clock.end_step_unobserved(
                names, scheduler_output.total_num_scheduled_tokens
            )
            return
        step = StepRecord(
            names, np.zeros(len(names), np.int64), scheduler_output.total_num_scheduled_tokens
        )
        step.draft_rows = draft_rows
        outcomes = None
        if table is not None:
            step.produced = np.array([len(output.sampled_token_ids[row]) for row in order])
            drafts = scheduler_output.scheduled_spec_decode_tokens
            given = sum(map(len, drafts.values()))
            outcomes = Outcomes.from_table(table, len(TREE_CUTS))
            step.verified = outcomes.admitted  # placeholders, too, which take time as well
            step.rows -= given - int(step.verified.sum())
            steps, self._steps_unlearned = self._steps_unlearned, 0
            self._trees.record_step(names, outcomes, step.produced - 1, steps=steps)
        step.context_lens = self._context_lens(names)
        self._clock.finish(step)
        if not step.context_lens.all():
            # Some requests ended while this step ran. It did read their contexts, so its time
            # would be attributed to something else.
            step.target_seconds = 0.0
        with step.timing("planning"):
            if outcomes is not None and self.planner.is_started:
                self.planner.learn_outcomes(step, outcomes)
            self.planner.record_step(step)
        self._cadence.record_step(self._planning_seconds + step.planning_seconds, step.seconds)
        self.statistics.record_times(step)


class V2AsyncScheduler(V2Scheduler, AsyncScheduler):
    """Asynchronous scheduler for V2: schedules a step while the last one runs."""
