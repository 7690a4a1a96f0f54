"""Chooses an engine's scheduler: V1's, or one of V2's two."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_dflash import __version__
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.scheduler_output import batch_too_small_warning
from vllm_dflash.engine.v2.v2_scheduler import V2AsyncScheduler, V2Scheduler


def build_scheduler(**arguments: Any) -> Scheduler:
    """Build an engine's scheduler; called by vLLM in place of a scheduler class."""
    logger().info(
        "vLLM's warning of a custom scheduler class is expected: it is vLLM's own scheduler with"
        " vllm-dflash's draft lengths, and vllm-dflash %s has checked that it fits this vLLM.",
        __version__,
    )
    config = arguments["vllm_config"]
    if remark := batch_too_small_warning(config):
        logger().log(*remark)
    if EngineOptions.from_config(config).runner == "v1":
        from vllm_dflash.engine.v1.v1_scheduler import V1Scheduler

        return V1Scheduler(**arguments)
    is_async = config.scheduler_config.async_scheduling
    return (V2AsyncScheduler if is_async else V2Scheduler)(**arguments)
