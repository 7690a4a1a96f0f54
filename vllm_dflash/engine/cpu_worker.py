"""Base of our CPU workers.

A separate module, because importing vLLM's CPU worker replaces torch's streams, events and pinned
memory with ones that do nothing, for the whole process: no GPU works after that.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dflash.engine.scheduler_output import fresh_cache_blocks
from vllm_dflash.engine.vllm_fixes.amx_permission import ask_for_amx
from vllm_dflash.engine.vllm_fixes.gathered_ids import fix_gathered_ids
from vllm_dflash.engine.vllm_fixes.sliding_sinks import fix_sliding_sinks
from vllm_dflash.engine.vllm_fixes.stale_blocks import clear_blocks
from vllm_dflash.engine.worker import DraftingWorker, Output


class DraftingCPUWorker(DraftingWorker, CPUWorker):
    """Base of our CPU workers: fixes bugs in vLLM's CPU code (hook "fixes")."""

    def init_device(self) -> None:
        """Build the model runner, with fixes for vLLM's CPU code before and after."""
        ask_for_amx()
        super().init_device()
        fix_gathered_ids()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models."""
        super().load_model(*args, **kwargs)
        fix_sliding_sinks(self.vllm_config)

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
        """Index, tokens per block and drafter layers of each cache group with drafter layers."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target, after clearing the drafter's cache blocks that have a new owner."""
        for group, page_size, layers in self.draft_groups:
            blocks = fresh_cache_blocks(scheduler_output, group, page_size)
            if blocks:
                clear_blocks((layer.kv_cache for layer in layers), self._num_blocks, blocks)
        return super().execute_model(scheduler_output)
