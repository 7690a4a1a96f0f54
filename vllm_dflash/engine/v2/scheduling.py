"""How the scheduler plans for Model Runner V2: a step ahead, whether vLLM schedules ahead or not.

The device decides what each request's drafts are, and verifies those that are worth it
(`speculator.py`). The scheduler says whether a block is run, keeps places for drafts, and learns
from what it hears of them two steps later, for all ranks alike.
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
from vllm_dflash.config.mode import TREE_CUTS, Mode, tree_sizes
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.estimates_file import EstimatesKeeper
from vllm_dflash.engine.reporting.figures import CountingScheduler
from vllm_dflash.engine.reporting.log import PeriodicLog
from vllm_dflash.engine.scheduled import room_for_blocks
from vllm_dflash.engine.step_clock import StepClock
from vllm_dflash.engine.v2.exchange import (
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
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler
from vllm_dflash.planning import Ints
from vllm_dflash.planning.ahead import Ahead, AheadPlanner
from vllm_dflash.planning.cadence import Cadence
from vllm_dflash.planning.rehearsal import rehearse_ahead
from vllm_dflash.planning.step import Outcomes, Step
from vllm_dflash.planning.tree_gain import TreeGain

FIRST_NEWS, MOST_NEWS = 4, 32
"""Steps after which workers are told what was learned: soon at first, then now and then."""


class DFlashDeviceScheduler(SessionScheduler, CountingScheduler):
    """vLLM's scheduler for V2, where a step is scheduled once the last one's tokens are known."""

    vllm_config: VllmConfig
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mode = Mode.of(self.vllm_config)
        width = self._width = mode.draft_width
        self.vllm_config = room_for_blocks(self.vllm_config)
        schedule = self.vllm_config.scheduler_config
        # vLLM 0.33 lets in as many requests as a step has room for blocks, which it takes to be as
        # long as the most drafts; those of trees are not.
        most = max(self.max_num_active_reqs, schedule.max_num_batched_tokens // (1 + width))
        self.max_num_active_reqs = min(most, mode.most_active or schedule.max_num_seqs)
        self._trees = PlacesOfTrees(mode.tree_nodes)
        self._tree_gain = TreeGain(tree_sizes(mode.tree_nodes))
        self.planner = AheadPlanner(width, self.vllm_config.scheduler_config.max_num_seqs)
        """Workers start it, unless draft lengths are fixed."""
        self._is_fixed = not mode.is_planned
        if not self._is_fixed:
            rehearse_ahead(width)
        own = drafted_length(self.vllm_config.speculative_config.draft_model_config)
        self._longest = min(own, self.max_model_len)
        """Tokens of a request whose drafts can be used."""
        self._log = PeriodicLog(self.statistics, envs.VLLM_LOG_STATS_INTERVAL)
        self._keeper: EstimatesKeeper | None = None
        self._clock, self._cadence = StepClock(), Cadence()
        self._is_anew = True
        """Whether the last step was planned anew; if so, the next output is learned from."""
        self._repeats_block = False
        self._planned_for: dict[str, int] = {}
        """Whether the last plan that was no probe runs a block, and the length it gives each
        request."""
        self._planning_seconds = 0.0
        """Spent on the last plan."""
        self._draft_rows = 0
        """Rows of the block behind the last step, which takes part of the next one's time."""
        self._news_in, self._news_every = FIRST_NEWS, FIRST_NEWS
        """Steps until workers are told what was learned, and between two such times."""
        self._places: dict[str, int] = {}
        """Drafts of each request of the last step that the next one is to verify, at most; where
        they are not as many of each."""

    # --- a step is scheduled ----------------------------------------------------------------

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        step, names = scheduler_output, list(scheduler_output.num_scheduled_tokens)
        self._places = {}
        if names:
            started = time.perf_counter()
            directions = self._plan(step, names)
            DIRECTIONS.attach(step, directions)
            self._planning_seconds = time.perf_counter() - started
            self.statistics.planning_seconds += self._planning_seconds
            length, count = step.num_spec_tokens_to_schedule, len(names) * self._has_block(step)
            could_draft = directions.could_draft
            self.statistics.observe_lengths(np.full(count, length), could_draft=could_draft)
        super()._update_after_schedule(step)
        if self.vllm_config.scheduler_config.async_scheduling:
            self._cut_to_places()

    def _plan(self, step: SchedulerOutput, names: list[str]) -> Directions:
        # vLLM 0.33 drafts nothing behind a step whose requests are in their prompts or at their
        # ends, whatever it is told; so nothing is to be charged, and no probe spent on it.
        if getattr(step, "skip_drafts", False):
            step.num_spec_tokens_to_schedule = 0
            return Directions(runs_block=False, could_draft=False, learned=self._news())
        self._is_anew = self._cadence.is_due(len(names)) or not self._planned_for
        self._is_anew |= self._trees.num_nodes > 0
        if not self._is_anew:
            return self._repeat(step)
        # At most, for nobody knows yet how many of the drafts in it are accepted.
        context = self._context_lens(names) + np.array([*step.num_scheduled_tokens.values()])
        ends = np.full(len(names), self._longest)
        limits = draft_limits(context, ends, self._width, np.ones(len(names), bool))
        ahead = Ahead(np.zeros_like(limits))
        # Fixed lengths are what they say: K behind every step.
        could_draft = self._is_fixed or self._can_use_drafts(names, context.tolist())
        if could_draft:
            ahead = self._ahead(names, context, limits)
        lengths = ahead.lengths
        if ahead.runs_block and self._trees.num_nodes:
            batch = names, self.requests, context, ends
            # vLLM 0.32 keeps each request as much room as its block has rows, 0.33 none.
            budget = self.vllm_config.scheduler_config.max_num_batched_tokens
            kept = self.vllm_config.speculative_config.max_num_new_slots_for_drafting
            room = budget - len(names) * kept
            most_rows = min(room, self.max_num_scheduled_tokens)
            of_trees = self._trees.places(lengths, *batch, most_rows)
            lengths = self._best_places(ahead, of_trees, context)
        length = int(lengths.max())
        step.num_spec_tokens_to_schedule = length
        if (lengths < length).any():
            self._places = dict(zip(names, lengths.tolist(), strict=True))
        return Directions(ahead.runs_block, ahead.min_verified, could_draft, learned=self._news())

    def _ahead(self, names: list[str], context: Ints, limits: Ints) -> Ahead:
        ahead = self.planner.plan(names, context, limits, self._cadence.steps)
        if ahead.is_probe:
            self._cadence.watch()
            return ahead
        self._repeats_block, self._planned_for = ahead.runs_block, {}
        if limits.any():  # else nothing was chosen
            # Those that are at their ends are not what others, and the steps to come, go by.
            freest = int(limits.argmax())
            most = int(ahead.lengths[freest])
            most = self._width if most == limits[freest] else most
            lengths = np.where(ahead.lengths < limits, ahead.lengths, most)
            self._planned_for = dict(zip(names, lengths.tolist(), strict=True))
        return ahead

    def _repeat(self, step: SchedulerOutput) -> Directions:
        """What was planned a few steps ago; requests that are new since then get what others got
        most. Without arrays: for the batches of a server that is quicker."""
        most, could_draft, lengths = max(self._planned_for.values()), self._is_fixed, []
        for name, rows in step.num_scheduled_tokens.items():
            request = self.requests.get(name)
            context = rows + (request.num_computed_tokens if request else 0)
            limit = max(0, min(self._longest - context - 2, self._width))
            lengths.append(min(self._planned_for.get(name, most), limit))
            could_draft = could_draft or self._can_use_drafts([name], [context])
        length = max(lengths) if could_draft else 0
        step.num_spec_tokens_to_schedule = length
        if could_draft and min(lengths) < length:
            self._places = dict(zip(step.num_scheduled_tokens, lengths, strict=True))
        runs_block = could_draft and self._repeats_block
        return Directions(runs_block, 0, could_draft, is_anew=False, learned=self._news())

    def _best_places(self, ahead: Ahead, of_trees: Ints, context: Ints) -> Ints:
        """Places for the drafts of each request, [R]: for chains, or for trees of the best of S
        sizes, [S, R]. Where the device trims, it verifies the nodes that pay; without a plan, trees
        were asked for."""
        if self.planner.trims or not self.planner.is_started:
            return of_trees[-1]
        seconds = self.planner.seconds(of_trees, context)
        best = self._tree_gain.best(len(context), ahead.promise, seconds, ahead.rate)
        return ahead.lengths if best is None else of_trees[best]

    def _can_use_drafts(self, names: list[str], context_lens: list[int]) -> bool:
        """Whether any request will be past its prompt behind the step, and not at its end.

        Drafts of one that gets fewer than three tokens more, this step's and the one behind a draft
        among them, could never be used.
        """
        return any(
            (request := self.requests.get(name)) is not None
            and context >= request.num_tokens
            and request.num_prompt_tokens + request.max_tokens - request.num_tokens > 2
            for name, context in zip(names, context_lens, strict=True)
        )

    def _news(self) -> Any:
        """What was learned, if it is time to tell."""
        self._news_in -= 1
        if self._news_in > 0:
            return None
        self._news_every = min(2 * self._news_every, MOST_NEWS)
        self._news_in = self._news_every
        return self.planner.learned()

    def _has_block(self, step: SchedulerOutput) -> bool:
        return directions_of(step).runs_block and step.num_spec_tokens_to_schedule > 0

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Where scheduling waits for drafts, they come with the tokens."""
        super().update_draft_token_ids(draft_token_ids)
        self._cut_to_places()

    def _cut_to_places(self) -> None:
        """Each request's drafts, or vLLM's placeholders for them."""
        for name, places in self._places.items():
            request = self.requests.get(name)
            if request is not None and request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[:places]

    def _context_lens(self, names: list[str]) -> Ints:
        """Tokens of context of each request of a step, as far as they are known by now, [R]."""
        requests = [self.requests.get(name) for name in names]
        lens = [request.num_computed_tokens if request else 0 for request in requests]
        return np.array(lens, dtype=np.int64)  # 0 for one that has ended or was aborted meanwhile

    # --- its output is there ------------------------------------------------------------------

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
            if self._keeper is not None:
                self._keeper.tick()
        return outputs

    def shutdown(self) -> None:
        """The engine ends: keep what was learned."""
        if self._keeper is not None:
            self._keeper.close()
        super().shutdown()

    def _start(self, facts: WorkerFacts) -> None:
        self.planner.looks_up = facts.looks_up
        self.planner.start(
            facts.costs, facts.lengths, trims=facts.trims, ragged_seconds=facts.ragged_seconds
        )
        if facts.memory is not None:
            self._keeper = EstimatesKeeper(facts.memory, self.planner)
            self._news_in = 0

    def _observe(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        # In the scheduler's order, which stays as it is as long as the batch does: the worker's has
        # those in front that have most drafts.
        names, table = list(scheduled.num_scheduled_tokens), OUTCOMES.on(output)
        self.free_drafts, outcomes = {}, None
        if table is not None:
            order = [output.req_id_to_index[name] for name in names]
            table = table[order]
            produced = [len(output.sampled_token_ids[row]) for row in order]
            verified = verified_drafts(table)
            self.statistics.count_verified(names, produced, verified)
            self.free_drafts = {name: free for name, (_, free) in zip(names, verified, strict=True)}
        draft_rows = self._draft_rows
        self._draft_rows = self._has_block(scheduled) * len(names) * (1 + self._width)
        if not self._is_anew:
            self.statistics.step_seconds += self._clock.skip(names)
            return
        step = Step(names, np.zeros(len(names), np.int64), scheduled.total_num_scheduled_tokens)
        step.draft_rows = draft_rows
        if table is not None:
            step.produced = np.array(produced)
            step.verified = np.array([count for count, _ in verified])
            drafts = scheduled.scheduled_spec_decode_tokens
            given = np.array([len(drafts.get(name, ())) for name in names], dtype=np.int64)
            if self.planner.trims:
                step.rows -= int(given.sum() - step.verified.sum())
            else:  # places that nobody had drafts for take their time as well
                step.verified = given
            outcomes = Outcomes.of(table, len(TREE_CUTS))
            if self._trees.num_nodes and not self.planner.trims:
                rest = self.planner.rest_of_chains(outcomes)
                self._tree_gain.observe(outcomes, step.produced - 1, rest)
        step.context_lens = self._context_lens(names)
        self._clock.finish(step)
        if not step.context_lens.all():
            # Of requests that ended while this step ran: it did read their contexts, and its time
            # would be taken for something else's.
            step.target_seconds = 0.0
        with step.timing("planning"):
            estimate = self.planner.observe(step, outcomes)
        self._cadence.observe(self._planning_seconds + step.planning_seconds, step.seconds)
        step.plan = replace(step.plan, speedup=self.planner.speedup)
        self.statistics.observe_time(step, estimate)


class DFlashAsyncScheduler(DFlashDeviceScheduler, AsyncScheduler):
    """The same for vLLM's asynchronous one, where a step is scheduled while the last one runs."""
