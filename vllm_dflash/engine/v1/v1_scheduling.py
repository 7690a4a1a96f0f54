"""V1's scheduler: drafts come with a step's output, and no call is made for them."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash.config.mode import CPU_RAY_EXECUTOR, SCHEDULER, Mode
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.figures import FREE_DRAFTS, CountingScheduler
from vllm_dflash.engine.scheduled import room_for_blocks
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler

DRAFTS: Message[DraftTokenIds | None] = Message("dflash_draft_token_ids")
"""From worker to scheduler, beside the sampled tokens; vLLM would call the workers for them after
every step, which takes longer between processes than planning and skipping a draft does."""


def drafts_come_with_the_output(vllm_config: VllmConfig) -> bool:
    """Whether workers send drafts along and the engine does not call for them: both ask here."""
    return (
        vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        and not vllm_config.use_v2_model_runner
        and vllm_config.parallel_config.distributed_executor_backend in ("mp", CPU_RAY_EXECUTOR)
    )


def skip_the_call_for_drafts() -> None:
    """Hook 2, in the engine's process; other engines of the process keep the call."""
    original = MultiprocExecutor.take_draft_token_ids
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return

    @functools.wraps(original)
    def take_draft_token_ids(self: MultiprocExecutor) -> DraftTokenIds | None:
        if drafts_come_with_the_output(self.vllm_config):
            return None
        return original(self)

    take_draft_token_ids.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    MultiprocExecutor.take_draft_token_ids = take_draft_token_ids


class DFlashScheduler(SessionScheduler, CountingScheduler):
    """On V1: takes the drafts that came with a step's output."""

    def __init__(self, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=room_for_blocks(vllm_config), **kwargs)
        self._width = Mode.of(vllm_config).draft_width
        # Without such a table, vLLM pads requests with placeholder drafts for CUDA graphs. For each
        # one, the CPU's kernel for sampled requests reads outside its tensor.
        self.dynamic_sd_lookup = [self._width] * (1 + self.max_num_running_reqs)
        # By this, vLLM counts what becomes of drafts.
        self.num_spec_tokens = vllm_config.num_speculative_tokens
        skip_the_call_for_drafts()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """What to run; workers may hand over as many drafts as there is room for."""
        most, self.num_spec_tokens = self.num_spec_tokens, self._width
        step = super().schedule(*args, **kwargs)
        step.num_spec_tokens_to_schedule = self.num_spec_tokens = most
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, then the drafts, in the order vLLM does."""
        self.free_drafts = FREE_DRAFTS.on(model_runner_output) or {}
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = DRAFTS.on(model_runner_output)
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs
