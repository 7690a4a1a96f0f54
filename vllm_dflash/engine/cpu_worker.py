"""What our workers on CPUs share.

A module of its own, because vLLM's CPU worker replaces streams, events and pinned memory of torch
by ones that do nothing, for the whole process, as soon as it is imported: no GPU works after that.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dflash.engine.scheduled import fresh_blocks
from vllm_dflash.engine.vllm_fixes.amx_permission import ask_for_amx
from vllm_dflash.engine.vllm_fixes.collective_memory import unlink_collective_memory
from vllm_dflash.engine.vllm_fixes.gathered_ids import mend_gathered_ids
from vllm_dflash.engine.vllm_fixes.sliding_sinks import mend_sliding_sinks
from vllm_dflash.engine.vllm_fixes.stale_blocks import clear_blocks
from vllm_dflash.engine.worker import DraftingWorker, Output


class DraftingCPUWorker(DraftingWorker, CPUWorker):
    """What our workers on CPUs share: what vLLM's kernels there get wrong, mended (hook 18)."""

    def init_device(self) -> None:
        """Mend what this vLLM's CPU kernels get wrong, then build the model runner."""
        ask_for_amx()
        super().init_device()
        unlink_collective_memory()
        mend_gathered_ids()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models."""
        super().load_model(*args, **kwargs)
        mend_sliding_sinks(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        super().initialize_from_config(kv_cache_config)
        layers = {a.attn.layer_name: a.attn for a in self.drafter.model.context.attentions}
        self._num_blocks = kv_cache_config.num_blocks
        self.draft_groups = [
            (number, group.kv_cache_spec.block_size, own)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if (own := [layers[name] for name in group.layer_names if name in layers])
        ]
        """Number, tokens per block and drafter's layers of each cache group that has any."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target, in whose cache nothing is left of earlier owners."""
        for group, block_size, layers in self.draft_groups:
            blocks = fresh_blocks(scheduler_output, group, block_size)
            if blocks:
                clear_blocks((layer.kv_cache for layer in layers), self._num_blocks, blocks)
        return super().execute_model(scheduler_output)
