"""Worker classes: where vLLM meets our proposer in each worker process."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_dflash import plugin
from vllm_dflash.options import DFlashOptions
from vllm_dflash.runner.periodic_log import PeriodicLog
from vllm_dflash.runner.profiling import profile_costs
from vllm_dflash.runner.scheduler import attach_drafts
from vllm_dflash.runner.v1 import DFlashProposer


class DFlashCPUWorker(CPUWorker):
    """vLLM's CPU worker with our proposer in its V1 model runner."""

    def init_device(self) -> None:
        """Build the model runner around our proposer."""
        plugin.install_v1_proposer(DFlashProposer)
        plugin.mend_cpu_sampling()
        super().init_device()
        plugin.attach_to_v1_runner(self.model_runner, DFlashProposer)
        self._log: PeriodicLog | None = None
        if self.rank == 0:
            plugin.log_active(DFlashOptions.of(self.vllm_config), runner="v1")

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up, then measure what steps cost, for the planner to start from."""
        times = super().compile_or_warm_up_model()
        if DFlashOptions.of(self.vllm_config).draft_length == "adaptive":
            started = time.perf_counter()
            with set_current_vllm_config(self.vllm_config):
                costs = profile_costs(self.model_runner, _first_ranks)
            self.model_runner.drafter.adapt_lengths(costs)
            if self.rank == 0:
                plugin.log_profile(costs, time.perf_counter() - started)
                statistics = self.model_runner.drafter.statistics
                self._log = PeriodicLog(
                    statistics, envs.VLLM_LOG_STATS_INTERVAL, plugin.logger().info
                )
        return times

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run the target, and sample and draft in the same call unless a grammar has a say.

        Saves a call from the engine, which between processes takes a while.
        """
        output = super().execute_model(scheduler_output)
        if output is None and not scheduler_output.has_structured_output_requests:
            return self.sample_tokens(None)
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput:
        """Sample and draft: the end of a step."""
        output = super().sample_tokens(grammar_output)
        has_drafts = self.model_runner.drafter.has_drafts
        if has_drafts and plugin.drafts_come_with_the_output(self.vllm_config):
            attach_drafts(output, self.take_draft_token_ids())
        self.model_runner.drafter.end_step()
        if self._log is not None:
            self._log.tick()
        return output

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of this worker, as `LLM.collective_rpc("dflash_stats")` returns them."""
        proposer = self.model_runner.drafter
        kind = type(proposer)
        return {
            "proposer": f"{kind.__module__}.{kind.__qualname__}",
            "runner": "v1",
            "block_size": proposer.spec.block_size,
            "draft_length": DFlashOptions.of(self.vllm_config).draft_length,
            **proposer.statistics.to_dict(),
        }


def _first_ranks(value: float) -> float:
    """What rank 0 measured."""
    group = get_tp_group()
    if group.world_size == 1:
        return value
    return float(group.broadcast(torch.tensor([value], dtype=torch.float64), src=0))
