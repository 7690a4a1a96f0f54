"""Worker classes: where vLLM meets our proposer in each worker process."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dflash import plugin
from vllm_dflash.options import DFlashOptions
from vllm_dflash.runner.v1 import DFlashProposer


class DFlashCPUWorker(CPUWorker):
    """vLLM's CPU worker with our proposer in its V1 model runner."""

    def init_device(self) -> None:
        """Build the model runner around our proposer."""
        plugin.install_v1_proposer(DFlashProposer)
        plugin.mend_cpu_sampling()
        super().init_device()
        plugin.attach_to_v1_runner(self.model_runner, DFlashProposer)
        if self.rank == 0:
            plugin.log_active(DFlashOptions.of(self.vllm_config), runner="v1")

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of this worker, as `LLM.collective_rpc("dflash_stats")` returns them."""
        proposer = self.model_runner.drafter
        kind = type(proposer)
        return {
            "proposer": f"{kind.__module__}.{kind.__qualname__}",
            "runner": "v1",
            "block_size": proposer.spec.block_size,
            **proposer.statistics.to_dict(),
        }
