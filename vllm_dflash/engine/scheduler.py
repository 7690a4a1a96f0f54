"""vLLM's schedulers, which also take what our workers send with a step's output."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash import plugin
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.uniform_length import UniformLength

DRAFTS = "dflash_draft_token_ids"
COSTS = "dflash_costs"


def attach_drafts(output: ModelRunnerOutput, drafts: DraftTokenIds | None) -> None:
    """In a worker: send the drafts along with the sampled tokens."""
    setattr(output, DRAFTS, drafts)


def attach_costs(output: ModelRunnerOutput, costs: StepCosts) -> None:
    """In a worker: send what steps cost along with the first sampled tokens."""
    setattr(output, COSTS, costs)


def build_scheduler(**arguments: Any) -> Scheduler:
    """The scheduler of an engine; stands where vLLM expects a class of schedulers."""
    config = arguments["vllm_config"]
    is_async = config.scheduler_config.async_scheduling
    return (DFlashAsyncScheduler if is_async else DFlashScheduler)(**arguments)


class DFlashScheduler(Scheduler):
    """Takes drafts from where `attach_drafts` put them.

    vLLM asks the workers for drafts in a call of its own after every step, which between
    processes takes longer than planning and skipping a draft does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The table is there for the graphs of asynchronous scheduling (`choose_verification`).
        self.dynamic_sd_lookup = None
        plugin.spare_the_call_for_drafts()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, then the drafts, in the order vLLM does."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = getattr(model_runner_output, DRAFTS, None)
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs


class DFlashAsyncScheduler(AsyncScheduler):
    """Chooses each step's draft length, which then holds for all requests.

    vLLM hands a length to the workers with every step, from a table by batch size; ours comes
    from what drafts have brought and steps have taken.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative = self.vllm_config.speculative_config
        choices = {0, self.num_spec_tokens}
        if self.dynamic_sd_lookup is not None:
            # The lengths that graphs were captured for, whatever the batch size.
            choices.update(self.dynamic_sd_lookup[1:])
        elif not speculative.enable_adaptive_verification:
            choices.update(range(self.num_spec_tokens))
        self.lengths: UniformLength | None = None
        if DFlashOptions.of(self.vllm_config).draft_length == "adaptive":
            self.lengths = UniformLength(self.num_spec_tokens, choices)
        self._decoded: set[str] = set()
        self._updated = 0.0

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.lengths is not None:
            scheduler_output.num_spec_tokens_to_schedule = self.lengths.choose(
                len(scheduler_output.num_scheduled_tokens)
            )
        super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, and learn from them and from the time they took."""
        if self.lengths is not None:
            costs = getattr(model_runner_output, COSTS, None)
            if costs is not None:
                self.lengths.costs = costs
            self._observe(self.lengths, scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _observe(
        self,
        lengths: UniformLength,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> None:
        now = time.perf_counter()
        seconds, self._updated = now - self._updated, now
        drafts = scheduler_output.scheduled_spec_decode_tokens
        counts = scheduler_output.num_scheduled_tokens
        rows = model_runner_output.req_id_to_index
        sampled = model_runner_output.sampled_token_ids
        produced = {name: len(sampled[rows[name]]) if sampled else 0 for name in counts}
        verified = [name for name in drafts if produced.get(name)]
        lengths.observe_verification(
            np.array([len(drafts[name]) for name in verified], dtype=np.int64),
            np.array([produced[name] - 1 for name in verified], dtype=np.int64),
        )
        decoded = {name for name in counts if counts[name] == 1 + len(drafts.get(name, ()))}
        # Where the same requests went on decoding, the time since the last step is this one's.
        if decoded and decoded == self._decoded and len(decoded) == len(counts):
            num_tokens = sum(counts.values())
            length = scheduler_output.num_spec_tokens_to_schedule
            lengths.observe_step(len(counts), num_tokens, length, seconds)
        self._decoded = decoded
