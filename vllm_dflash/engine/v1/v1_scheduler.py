"""V1's scheduler: drafts arrive with a step's output, without a separate call."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash.config.engine_options import CPU_RAY_EXECUTOR, SCHEDULER, EngineOptions
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.figures import CountingScheduler
from vllm_dflash.engine.scheduler_output import room_for_blocks
from vllm_dflash.engine.vllm_fixes.stopped_sessions import SessionScheduler

DRAFTS: Message[DraftTokenIds | None] = Message("dflash_draft_token_ids")
"""Drafts, from worker to scheduler, sent with the sampled tokens. vLLM would call the workers for
them after every step; between processes, that takes longer than planning and skipping a draft."""


def sends_drafts_with_output(vllm_config: VllmConfig) -> bool:
    """Whether workers send drafts with the output, so that the engine need not call for them. Both
    sides call this function."""
    return (
        vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        and not vllm_config.use_v2_model_runner
        and vllm_config.parallel_config.distributed_executor_backend in ("mp", CPU_RAY_EXECUTOR)
    )


def skip_draft_call() -> None:
    """Skip vLLM's call (hook "drafts with output") in the engine's process; others keep it."""
    original = MultiprocExecutor.take_draft_token_ids
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return

    @functools.wraps(original)
    def take_draft_token_ids(self: MultiprocExecutor) -> DraftTokenIds | None:
        if sends_drafts_with_output(self.vllm_config):
            return None
        return original(self)

    take_draft_token_ids.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    MultiprocExecutor.take_draft_token_ids = take_draft_token_ids


class V1Scheduler(SessionScheduler, CountingScheduler):
    """V1's scheduler: takes the drafts that come with a step's output."""

    def __init__(self, *args: Any, vllm_config: VllmConfig, **kwargs: Any) -> None:
        super().__init__(*args, vllm_config=room_for_blocks(vllm_config), **kwargs)
        self._width = EngineOptions.from_config(vllm_config).draft_width
        # Without this table, vLLM pads requests with placeholder drafts for CUDA graphs. For each
        # placeholder, the CPU kernel for sampled requests reads outside its tensor.
        self.dynamic_sd_lookup = [self._width] * (1 + self.max_num_running_reqs)
        # vLLM's draft statistics use this length.
        self.num_spec_tokens = vllm_config.num_speculative_tokens
        skip_draft_call()

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step, reserving room for blocks; drafts may be longer than a block."""
        most, self.num_spec_tokens = self.num_spec_tokens, self._width
        step = super().schedule(*args, **kwargs)
        step.num_spec_tokens_to_schedule = self.num_spec_tokens = most
        return step

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Process the sampled tokens, then the drafts, in vLLM's order."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = DRAFTS.on(model_runner_output)
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs
