"""Drafts that travel with a step's output, instead of being called for after it.

vLLM asks the workers for drafts in a call of its own after every synchronous step, which between
processes takes longer than planning and skipping a draft does.
"""

from __future__ import annotations

import functools

from vllm.config import VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import DraftTokenIds

from vllm_dflash.config.mode import CPU_RAY_EXECUTOR, SCHEDULER
from vllm_dflash.engine.message import Message

DRAFTS: Message[DraftTokenIds | None] = Message("dflash_draft_token_ids")
"""V1, worker to scheduler: beside the sampled tokens."""


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
