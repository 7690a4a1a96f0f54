"""`Mode`: on what an engine runs, and who decides there; found out once, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vllm_dflash.config.class_paths import CPU_WORKER, CPU_WORKER_V2, GPU_WORKER
from vllm_dflash.config.speculative_settings import SpeculativeSettings
from vllm_dflash.vllms_own import SWITCH_OFF

if TYPE_CHECKING:
    from vllm.config import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

MOST_FREE_DRAFTS = 32
"""Of a request and step. More are seldom accepted; a step has a row for each that is verified."""


@dataclass(frozen=True)
class Mode:
    """Nothing in it depends on whether vLLM schedules asynchronously: V1 does not on CPUs, and what
    the device decides on V2 is the same either way."""

    runner: Literal["v1", "v2"]
    """vLLM's model runner. On V1 the host plans, on V2 the device decides."""
    on_cuda: bool = False
    is_planned: bool = True
    """Whether draft lengths are planned, and not fixed."""
    has_own_scheduler: bool = True
    """Ours, unless the user named one."""
    has_room: bool = True
    """Whether a step has rows for drafts of a request that are more than a block."""

    @classmethod
    def of(
        cls, engine_args: EngineArgs, parallel: ParallelConfig, settings: SpeculativeSettings
    ) -> Mode:
        """That of an engine that is to start.

        Raises:
            ValueError: another worker class was asked for, or the platform is not supported.
        """
        from vllm import envs
        from vllm.platforms import current_platform

        if not (current_platform.is_cpu() or current_platform.is_cuda()):
            raise ValueError(
                "vllm-dflash supports vLLM's CPU and CUDA platforms, not"
                f" {current_platform.device_name!r}. {SWITCH_OFF}."
            )
        on_cuda = current_platform.is_cuda()
        step_tokens = engine_args.max_num_batched_tokens
        mode = cls(
            runner="v2" if on_cuda or envs.VLLM_USE_V2_MODEL_RUNNER else "v1",
            on_cuda=on_cuda,
            is_planned=settings.draft_length == "adaptive",
            has_own_scheduler=engine_args.scheduler_cls is None,
            has_room=step_tokens is None or step_tokens > MOST_FREE_DRAFTS,
        )
        if parallel.worker_cls not in ("auto", mode.worker):
            raise ValueError(
                "method 'dflash' brings its own worker class, but worker_cls is"
                f" {parallel.worker_cls!r}. Leave worker_cls out. {SWITCH_OFF}."
            )
        return mode

    @property
    def worker(self) -> str:
        """The worker class (hook 3)."""
        if self.on_cuda:
            return GPU_WORKER  # which refuses V1: what vLLM will choose is not known yet
        return CPU_WORKER if self.runner == "v1" else CPU_WORKER_V2

    @property
    def allows_long_drafts(self) -> bool:
        """Whether free drafts may be more than a block has: somebody else's scheduler
        would keep that much room for each request, and on V2 buffers are a block wide."""
        return self.runner == "v1" and self.has_own_scheduler and self.has_room

    @property
    def captures_lengths(self) -> bool:
        """Whether vLLM is given a table of lengths to capture graphs for (hook 8). Another
        scheduler would take it at its word."""
        return self.on_cuda and self.is_planned and self.has_own_scheduler
