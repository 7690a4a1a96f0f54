"""How anything of ours travels between the engine's process and its workers.

A step's `SchedulerOutput` and `ModelRunnerOutput` are pickled with whatever attributes they have.
So what we have to say goes along with them, and no call is made for it. Each kind stands beside
what it holds; `DRAFTS`, for which vLLM would call the workers after every synchronous step, here.
Between processes a call takes longer than planning and skipping a draft does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm.config import VllmConfig
from vllm.v1.outputs import DraftTokenIds

from vllm_dflash.config.mode import CPU_RAY_EXECUTOR, SCHEDULER

Content = TypeVar("Content")


@dataclass(frozen=True)
class Message(Generic[Content]):
    """One kind of message."""

    name: str
    """Of the attribute that holds it."""

    def attach(self, carrier: Any, content: Content) -> None:
        """Send it along with one of vLLM's objects."""
        setattr(carrier, self.name, content)

    def on(self, carrier: Any) -> Content | None:
        """What came with one of vLLM's objects, if anything did."""
        return getattr(carrier, self.name, None)


DRAFTS: Message[DraftTokenIds | None] = Message("dflash_draft_token_ids")
"""V1, worker to scheduler: beside the sampled tokens."""


def drafts_come_with_the_output(vllm_config: VllmConfig) -> bool:
    """Whether workers send drafts along and the engine does not call for them: both ask here."""
    return (
        vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        and not vllm_config.use_v2_model_runner
        and vllm_config.parallel_config.distributed_executor_backend in ("mp", CPU_RAY_EXECUTOR)
    )
