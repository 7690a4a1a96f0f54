"""Schedulers for Model Runner V2, synchronous or not.

The device decides what each request's drafts are, and verifies those that are worth it
(`speculator.py`). When a step is scheduled, the scheduler decides for all ranks whether it runs a
block, and how many drafts of each request the step after it verifies. It learns from outcomes that
arrive two steps later, or one (docs/engineering/architecture.md has the path of a length).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from vllm import envs
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.engine_options import TREE_CUTS, EngineOptions, tree_sizes
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.reporting.figures import CountingScheduler
from vllm_dflash.engine.reporting.log import PeriodicLog
from vllm_dflash.engine.scheduler_output import never_drafts, room_for_blocks
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v2.exchange import (
    BLOCK_SECONDS,
    CHAINS_ONLY,
    DIRECTIONS,
    FACTS,
    OUTCOMES,
    Directions,
    WorkerFacts,
    directions_of,
    verified_drafts,
)
from vllm_dflash.engine.v2.trees.tree_requests import PlacesOfTrees
from vllm_dflash.engine.v2.windows_ahead import WindowsAhead
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler
from vllm_dflash.planning import Ints
from vllm_dflash.planning.ahead import AheadPlanner, PlanAhead
from vllm_dflash.planning.cadence import Cadence
from vllm_dflash.planning.rehearsal import rehearse_ahead
from vllm_dflash.planning.step import Outcomes, StepRecord
from vllm_dflash.planning.tree_gain import TreeGain
from vllm_dflash.planning.window import WHOLE

FIRST_NEWS, MOST_NEWS = 4, 32
"""Steps between two `learned` messages to workers: at first, and at most. The number doubles."""


class V2Scheduler(SessionScheduler, CountingScheduler):
    """Synchronous scheduler for V2: schedules a step once the last one's tokens are known."""

    vllm_config: VllmConfig
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = EngineOptions.of(self.vllm_config)
        width = self._width = options.draft_width
        self.vllm_config = room_for_blocks(self.vllm_config)
        schedule = self.vllm_config.scheduler_config
        # vLLM 0.33 admits as many requests as a step has room for blocks, and assumes blocks as
        # long as the maximum number of drafts. With trees, blocks are shorter.
        most = max(self.max_num_active_reqs, schedule.max_num_batched_tokens // (1 + width))
        self.max_num_active_reqs = min(most, options.most_active or schedule.max_num_seqs)
        self._trees = PlacesOfTrees(options.tree_nodes)
        self._tree_gain = TreeGain(tree_sizes(options.tree_nodes))
        self.planner = AheadPlanner(width, schedule.max_num_seqs, fair=options.is_fair)
        """Started by the workers' facts, unless draft lengths are fixed."""
        self._is_fixed = not options.is_planned
        if not self._is_fixed:
            rehearse_ahead(width)
        own = drafted_length(self.vllm_config.speculative_config.draft_model_config)
        self._longest = min(own, self.max_model_len)
        """Maximum length of a request that can use drafts, in tokens."""
        self._windows = (
            WindowsAhead(self._longest, self.planner) if options.chooses_window else None
        )
        chooser = None if self._windows is None else self._windows.chooser
        self._log = PeriodicLog(self.statistics, envs.VLLM_LOG_STATS_INTERVAL, chooser)
        self._clock, self._cadence = StepClock(), Cadence()
        self._plans_and_learns = True
        """Whether the step is planned, and the planner learns from the next output."""
        self._repeats_block = False
        """Whether the last plan that was no experiment runs a block."""
        self._planned_for: dict[str, int] = {}
        """Length of each request in that plan."""
        self._planning_seconds = 0.0
        """Time spent on the last plan."""
        self._last_block = 0, WHOLE
        """Rows and window of the last step's block, whose time is part of the next step's."""
        self._news_in, self._news_every = FIRST_NEWS, FIRST_NEWS
        """Steps until the next `learned` message to workers, and between two of them."""
        self._places: dict[str, int] = {}
        """Maximum number of each request's drafts that the next step verifies; empty if it is the
        same for all."""

    # --- scheduling a step ------------------------------------------------------------------

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        names = list(scheduler_output.num_scheduled_tokens)
        self._places = {}
        if names:
            started = time.perf_counter()
            directions = self._plan(scheduler_output, names)
            if self._windows is not None:
                directions = self._windows.direct(
                    directions, lambda: self._context_lens_after(scheduler_output, names)
                )
            DIRECTIONS.attach(scheduler_output, directions)
            seconds = time.perf_counter() - started
            self.statistics.planning_seconds += seconds
            if not never_drafts(scheduler_output):
                self._planning_seconds = seconds
            length, could = scheduler_output.num_spec_tokens_to_schedule, directions.could_draft
            drafted = names * self._has_block(scheduler_output)
            if self._places and drafted:
                lengths = np.array([self._places[name] for name in drafted])
                self.statistics.observe_lengths(lengths, could_draft=could)
            else:
                self.statistics.observe_length(len(drafted), length, could_draft=could)
        super()._update_after_schedule(scheduler_output)
        if self.vllm_config.scheduler_config.async_scheduling:
            self._cut_to_places()

    def _plan(self, scheduler_output: SchedulerOutput, names: list[str]) -> Directions:
        if never_drafts(scheduler_output):  # charge nothing for it, and spend no probe on it
            self._plans_and_learns = self._cadence.is_due(len(names))
            scheduler_output.num_spec_tokens_to_schedule = 0
            return Directions(runs_block=False, could_draft=False, **self._news())
        self._plans_and_learns = self._cadence.is_due(len(names)) or not self._planned_for
        self._plans_and_learns |= self._trees.num_nodes > 0
        if not self._plans_and_learns:
            return self._repeat(scheduler_output)
        context = self._context_lens_after(scheduler_output, names)
        ends = np.full(len(names), self._longest)
        limits = draft_limits(context, ends, self._width, np.ones(len(names), bool))
        ahead = PlanAhead(np.zeros_like(limits))
        # Fixed lengths: K drafts after every step.
        could_draft = self._is_fixed or self._can_use_drafts(names, context.tolist())
        if could_draft:
            ahead = self._ahead(names, context, limits)
        lengths = ahead.lengths
        if ahead.runs_block and self._trees.num_nodes:
            batch = names, self.requests, context, ends
            # vLLM 0.32 reserves room for each request's block, 0.33 none.
            budget = self.vllm_config.scheduler_config.max_num_batched_tokens
            kept = self.vllm_config.speculative_config.max_num_new_slots_for_drafting
            room = budget - len(names) * kept
            most_rows = min(room, self.max_num_scheduled_tokens)
            of_trees = self._trees.places(lengths, *batch, most_rows)
            lengths = self._best_places(ahead, of_trees, context)
        length = int(lengths.max())
        scheduler_output.num_spec_tokens_to_schedule = length
        if (lengths < length).any():
            self._places = dict(zip(names, lengths.tolist(), strict=True))
        return Directions(ahead.runs_block, ahead.min_verified, could_draft, **self._news())

    def _ahead(self, names: list[str], context: Ints, limits: Ints) -> PlanAhead:
        ahead = self.planner.plan(names, context, limits, self._cadence.take_steps_since_plan())
        if ahead.is_experiment:
            self.statistics.probes += ahead.runs_block
            self._cadence.watch()
            return ahead
        self._repeats_block, self._planned_for = ahead.runs_block, {}
        if limits.any():  # else nothing was chosen
            # A request near its end gets a short length for that reason alone. When the plan is
            # repeated, it and others use the length of the request that has most room.
            freest = int(limits.argmax())
            most = int(ahead.lengths[freest])
            most = self._width if most == limits[freest] else most
            lengths = np.where(ahead.lengths < limits, ahead.lengths, most)
            self._planned_for = dict(zip(names, lengths.tolist(), strict=True))
        return ahead

    def _repeat(self, scheduler_output: SchedulerOutput) -> Directions:
        """Repeat the last plan; requests that are new since then get its longest length. Uses no
        arrays, which is faster for a server's batches."""
        most, could_draft, lengths = max(self._planned_for.values()), self._is_fixed, []
        for name, rows in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            context = rows + (request.num_computed_tokens if request else 0)
            limit = max(0, min(self._longest - context - 2, self._width))
            lengths.append(min(self._planned_for.get(name, most), limit))
            could_draft = could_draft or self._can_use_drafts([name], [context])
        length = max(lengths) if could_draft else 0
        scheduler_output.num_spec_tokens_to_schedule = length
        if could_draft and min(lengths) < length:
            self._places = dict(zip(scheduler_output.num_scheduled_tokens, lengths, strict=True))
        runs_block = could_draft and self._repeats_block
        return Directions(runs_block, 0, could_draft, has_new_plan=False, **self._news())

    def _best_places(self, ahead: PlanAhead, of_trees: Ints, context: Ints) -> Ints:
        """Places for each request's drafts, [R]: for chains, or for trees of the best of S sizes,
        [S, R]. The largest size if the device trims, since it then verifies only the nodes that
        pay, or if lengths are not planned."""
        if self.planner.trims or not self.planner.is_started:
            return of_trees[-1]
        seconds = self.planner.seconds(of_trees, context)
        best = self._tree_gain.best(
            len(context),
            ahead.promise,
            seconds,
            ahead.rate,
            text_promise=ahead.text_promise,
            fair=self.planner.fair,
        )
        return ahead.lengths if best is None else of_trees[best]

    def _can_use_drafts(self, names: list[str], context_lens: list[int]) -> bool:
        """Whether any request will be past its prompt after the step, and not at its end.

        A request needs three more tokens to use drafts: this step's, a draft, and the bonus token
        after it.
        """
        return any(
            (request := self.requests.get(name)) is not None
            and context >= request.num_tokens
            and request.num_prompt_tokens + request.max_tokens - request.num_tokens > 2
            for name, context in zip(names, context_lens, strict=True)
        )

    def _news(self) -> dict[str, Any]:
        """What was learned and counted, and how windows do, if a message to workers is due."""
        self._news_in -= 1
        if self._news_in > 0:
            return {}
        self._news_every = min(2 * self._news_every, MOST_NEWS)
        self._news_in = self._news_every
        windows = None if self._windows is None else self._windows.chooser.report()
        counted = self.statistics.of_planning()
        return {"learned": self.planner.learned(), "counted": counted, "window_report": windows}

    def _has_block(self, scheduler_output: SchedulerOutput) -> bool:
        return (
            directions_of(scheduler_output).runs_block
            and scheduler_output.num_spec_tokens_to_schedule > 0
        )

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Cut drafts to their places. Called by vLLM if scheduling is synchronous."""
        super().update_draft_token_ids(draft_token_ids)
        self._cut_to_places()

    def _cut_to_places(self) -> None:
        """Cut each request's drafts, or vLLM's placeholders for them, to its places."""
        for name, places in self._places.items():
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[:places]

    def _context_lens(self, names: list[str]) -> Ints:
        """Tokens of context of each request of a step, as far as known by now, [R]."""
        requests = [self.requests.get(name) for name in names]
        lens = [request.num_computed_tokens if request else 0 for request in requests]
        return np.array(lens, dtype=np.int64)  # 0 if it has ended or was aborted meanwhile

    def _context_lens_after(self, scheduler_output: SchedulerOutput, names: list[str]) -> Ints:
        """Tokens of context of each request after a step that is being scheduled, at most, [R]: it
        is not known yet how many of its drafts are accepted."""
        added = np.array([*scheduler_output.num_scheduled_tokens.values()])
        return self._context_lens(names) + added

    # --- the output of a step -----------------------------------------------------------------

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, and learn from them and from the time they took."""
        if CHAINS_ONLY.on(model_runner_output):
            self._trees = PlacesOfTrees(0)
        facts = FACTS.on(model_runner_output)
        if facts is not None:
            self._start(facts)
        self._observe(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._log.tick()
        return outputs

    def _start(self, facts: WorkerFacts) -> None:
        self.planner.start(
            facts.costs, facts.lengths, trims=facts.trims, ragged_seconds=facts.ragged_seconds
        )

    def _observe(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> None:
        # Use the scheduler's order, which is stable while the batch is; the worker puts requests
        # with most drafts first.
        names, table = list(scheduler_output.num_scheduled_tokens), OUTCOMES.on(output)
        self.verified_drafts, outcomes = {}, None
        produced: list[int] = []
        verified: list[tuple[int, int]] = []
        if table is not None:
            order = [output.req_id_to_index[name] for name in names]
            table = table[order]
            produced = [len(output.sampled_token_ids[row]) for row in order]
            verified = verified_drafts(table)
            self.statistics.count_verified(names, produced, verified)
            self.verified_drafts = dict(zip(names, (count for count, _ in verified), strict=True))
        draft_rows, window = self._last_block
        rows = self._has_block(scheduler_output) * len(names) * (1 + self._width)
        self._last_block = rows, directions_of(scheduler_output).window
        if not self._plans_and_learns:
            seconds = self._clock.pass_over(names)
            self.statistics.step_seconds += seconds
            self._observe_window(scheduler_output, output, produced, verified, seconds)
            return
        step = StepRecord(
            names, np.zeros(len(names), np.int64), scheduler_output.total_num_scheduled_tokens
        )
        step.draft_rows, step.plan = draft_rows, replace(step.plan, window=window)
        if table is not None:
            step.produced = np.array(produced)
            drafts = scheduler_output.scheduled_spec_decode_tokens
            given = np.array([len(drafts.get(name, ())) for name in names], dtype=np.int64)
            outcomes = Outcomes.of(table, len(TREE_CUTS))
            # Placeholders take time as well.
            step.verified = outcomes.admitted if self.planner.trims else given
            step.rows -= int(given.sum() - step.verified.sum())
            if self._trees.num_nodes and not self.planner.trims:
                rest = self.planner.rest_of_chains(outcomes)
                self._tree_gain.observe(outcomes, step.produced - 1, rest)
        step.context_lens = self._context_lens(names)
        self._clock.finish(step)
        self._observe_window(scheduler_output, output, produced, verified, step.seconds)
        if not step.context_lens.all():
            # Some requests ended while this step ran. It did read their contexts, so its time
            # would be attributed to something else.
            step.target_seconds = 0.0
        with step.timing("planning"):
            estimate = self.planner.observe(step, outcomes)
        self._cadence.observe(self._planning_seconds + step.planning_seconds, step.seconds)
        step.plan = replace(step.plan, speedup=self.planner.speedup)
        self.statistics.observe_time(step, estimate)

    def _observe_window(
        self,
        scheduler_output: SchedulerOutput,
        output: ModelRunnerOutput,
        produced: list[int],
        verified: list[tuple[int, int]],
        seconds: float,
    ) -> None:
        """Learn about draft windows; see `WindowsAhead.observe`. Empty lists: nothing is known."""
        if self._windows is None or not verified:
            return
        drafts = scheduler_output.scheduled_spec_decode_tokens.values()
        rows = scheduler_output.total_num_scheduled_tokens
        has_prompts = rows > len(produced) + sum(map(len, drafts))
        directions, took = directions_of(scheduler_output), BLOCK_SECONDS.on(output)
        self._windows.observe(
            directions, produced, verified, seconds, took, has_prompts=has_prompts
        )


class V2AsyncScheduler(V2Scheduler, AsyncScheduler):
    """Asynchronous scheduler for V2: schedules a step while the last one runs."""
