"""vLLM's schedulers, which also take what our workers send with a step's output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dflash import __version__
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.vllms_log import hush
from vllm_dflash.engine.drafts_in_output import attached_drafts, skip_the_call_for_drafts
from vllm_dflash.engine.estimates_file import EstimatesKeeper, Memory
from vllm_dflash.engine.figures import FiguresToSend, attached_figures, send_figures
from vllm_dflash.engine.log import logger
from vllm_dflash.engine.padding import newly_admitted
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.rehearsal import rehearse_uniform_length
from vllm_dflash.planning.step import Step, StepClock
from vllm_dflash.planning.uniform_length import UniformLength
from vllm_dflash.seams import ENGINE, check_seams

FACTS = "dflash_facts"


@dataclass(frozen=True)
class WorkerFacts:
    """What a worker found out while it started, and the scheduler plans by."""

    costs: StepCosts
    lengths: Sequence[int]
    """Draft lengths that all requests of a step can be given, 0 and K among them."""
    trims: bool = False
    """Whether the device drops drafts that are not worth verifying."""
    memory: Memory | None = None
    """What an earlier engine had learned, and where to keep what this one does."""


def attach_facts(output: ModelRunnerOutput, facts: WorkerFacts) -> None:
    """In a worker: send them along with the first sampled tokens."""
    setattr(output, FACTS, facts)


def build_scheduler(**arguments: Any) -> Scheduler:
    """The scheduler of an engine; stands where vLLM expects a class of schedulers."""
    check_seams(ENGINE)
    hush()  # hook 26
    logger().info(
        "vLLM's warning of a custom scheduler class is expected: build_scheduler gives its own"
        " scheduler with vllm-dflash's draft lengths, asynchronous where vLLM's would be, and"
        " vllm-dflash %s checks that vLLM is one it was written for.",
        __version__,
    )
    config = arguments["vllm_config"]
    is_async = config.scheduler_config.async_scheduling
    return (DFlashAsyncScheduler if is_async else DFlashScheduler)(**arguments)


def room_for_blocks(config: VllmConfig) -> VllmConfig:
    """A config by which, of a step's tokens and of the cache, each request is kept as much room as
    its block has rows.

    Free drafts may be more than that, but those that a step verifies are among its tokens anyway.
    vLLM would keep room for a block as long as the longest draft.
    """
    narrow, speculative = copy(config), copy(config.speculative_config)
    assert speculative is not None
    speculative.num_speculative_tokens = DFlashOptions.of(config).draft_width
    narrow.speculative_config = speculative
    return narrow


class DFlashScheduler(Scheduler):
    """Takes the drafts that came with a step's output, and hands on the figures."""

    def __init__(self, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=room_for_blocks(vllm_config), **kwargs)
        self._most_drafts = vllm_config.num_speculative_tokens
        # The table is there for the graphs of asynchronous scheduling (`choose_verification`).
        self.dynamic_sd_lookup = None
        skip_the_call_for_drafts()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """What to run; workers may hand over as many drafts as there is room for."""
        step = super().schedule(*args, **kwargs)
        step.num_spec_tokens_to_schedule = self._most_drafts
        return step

    def add_request(self, request: Request) -> None:
        """Count what becomes of its drafts by position, for as many as there can be."""
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = RequestSpecDecodeMetrics.new(self._most_drafts)

    def make_spec_decoding_stats(
        self, spec_decoding_stats: SpecDecodingStats | None, *args: Any, **kwargs: Any
    ) -> SpecDecodingStats | None:
        """The same of all requests of a step."""
        counted = spec_decoding_stats or SpecDecodingStats.new(self._most_drafts)
        return super().make_spec_decoding_stats(counted, *args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, then the drafts, in the order vLLM does."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = attached_drafts(model_runner_output)
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        if figures := attached_figures(model_runner_output):
            send_figures(outputs, figures)
        return outputs


class DFlashAsyncScheduler(AsyncScheduler):
    """Chooses each step's draft length, which then holds for all requests.

    vLLM hands a length to the workers with every step, from a table by batch size; ours comes
    from what drafts have brought and steps have taken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lengths: UniformLength | None = None
        if DFlashOptions.of(self.vllm_config).draft_length == "adaptive":
            self.lengths = UniformLength(self.num_spec_tokens)
            rehearse_uniform_length(self.num_spec_tokens)
        self.statistics = DraftStatistics(self.num_spec_tokens)
        self._figures = FiguresToSend(self.statistics)
        self._keeper: EstimatesKeeper | None = None
        self._clock = StepClock()
        self._draft_rows = 0
        """Of the block forward behind the last step, which takes part of the next one's time."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        num_requests = len(scheduler_output.num_scheduled_tokens)
        # vLLM 0.33 drafts nothing behind a step whose requests are in their prompts or at their
        # ends, whatever it is told; so nothing is to be charged, and no probe spent on it.
        if is_skipped := getattr(scheduler_output, "skip_drafts", False):
            scheduler_output.num_spec_tokens_to_schedule = 0
        elif self.lengths is not None:
            started = time.perf_counter()
            context = float(self._context_lens(scheduler_output).sum())
            length = self.lengths.choose(num_requests, context)
            scheduler_output.num_spec_tokens_to_schedule = length
            self.statistics.planning_seconds += time.perf_counter() - started
        if num_requests:
            length = scheduler_output.num_spec_tokens_to_schedule
            self.statistics.observe_uniform(length, num_requests, could_draft=not is_skipped)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, and learn from them and from the time they took."""
        if self.lengths is not None:
            facts = getattr(model_runner_output, FACTS, None)
            if facts is not None:
                self.lengths.start(facts.costs, facts.lengths, trims=facts.trims)
                if facts.memory is not None:
                    self._keeper = facts.memory.attend(self.lengths)
            self._observe(self.lengths, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        is_busy = scheduler_output.total_num_scheduled_tokens > 0
        if self._keeper is not None and is_busy:
            self._keeper.tick()
        if figures := self._figures.tick() if is_busy else self._figures.take():
            send_figures(outputs, figures)
        return outputs

    def shutdown(self) -> None:
        """The engine ends: keep what was learned."""
        if self._keeper is not None:
            self._keeper.close()
        super().shutdown()

    def _context_lens(self, scheduler_output: SchedulerOutput) -> Ints:
        """Tokens of context of each request of a step, as far as they are known by now, [R]."""
        requests = [self.requests.get(name) for name in scheduler_output.num_scheduled_tokens]
        lens = [request.num_computed_tokens if request else 0 for request in requests]
        return np.array(lens, dtype=np.int64)  # 0 for one that was aborted meanwhile

    def _observe(
        self,
        lengths: UniformLength,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        padded = newly_admitted(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        rows = model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        names = list(scheduler_output.num_scheduled_tokens)
        step = Step(
            names,
            np.array([len(sampled[rows[name]]) if sampled else 0 for name in names]),
            rows=scheduler_output.total_num_scheduled_tokens,
        )
        step.verified = np.array(
            [0 if name in padded else len(drafts.get(name, ())) for name in names]
        )
        step.context_lens = self._context_lens(scheduler_output)
        step.draft_rows = self._draft_rows
        drafts_next = scheduler_output.num_spec_tokens_to_schedule > 0
        self._draft_rows = drafts_next * len(names) * (1 + self.num_spec_tokens)
        self._clock.finish(step)
        with step.timing("planning"):
            estimate = lengths.observe(step)
        step.plan = replace(step.plan, speedup=lengths.speedup)
        self.statistics.observe_time(step, estimate)
