"""Cache blocks that a step gives to its requests, cleared of what their last owners left.

vLLM's CPU attention kernel, which serves both model runners there, reads a request's last block to
its end. Keys and values behind the context count for nothing, unless one is NaN or infinite: then
so is the result, and the request would go undrafted until it has overwritten them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig


class FreshBlocks:
    """Clears the drafter's part of every block that a step allocates."""

    def __init__(self, cache: KVCacheConfig, layers: Sequence[Attention]) -> None:
        """For the drafter's layers in an allocated cache."""
        self._num_blocks = cache.num_blocks
        self._groups = [
            (number, group.kv_cache_spec.block_size, own)
            for number, group in enumerate(cache.kv_cache_groups)
            if (own := [layer for layer in layers if layer.layer_name in group.layer_names])
        ]

    def clear(self, step: SchedulerOutput) -> None:
        """Leave nothing of earlier owners in the blocks of this step; call before it runs."""
        for number, block_size, layers in self._groups:
            if blocks := fresh_blocks(step, number, block_size):
                clear_blocks((layer.kv_cache for layer in layers), self._num_blocks, blocks)


def fresh_blocks(step: SchedulerOutput, group: int, block_size: int) -> list[int]:
    """Blocks of a cache group that this step allocates; none that a prefix was found in.

    Args:
        step: what the scheduler hands to the workers.
        group: of the cache.
        block_size: tokens per block of this group.
    """
    fresh: list[int] = []
    for request in step.scheduled_new_reqs:
        fresh += request.block_ids[group][-(-request.num_computed_tokens // block_size) :]
    going_on = step.scheduled_cached_reqs
    for name, blocks, computed in zip(
        going_on.req_ids, going_on.new_block_ids, going_on.num_computed_tokens, strict=True
    ):
        if blocks is not None:  # of a preempted request that resumes all, else what is added
            found = -(-computed // block_size) if name in going_on.resumed_req_ids else 0
            fresh += blocks[group][found:]
    return fresh


def clear_blocks(caches: Iterable[torch.Tensor], num_blocks: int, blocks: list[int]) -> None:
    """Zero these of all `num_blocks` blocks in caches whose first dimension they divide."""
    for cache in caches:
        by_block = cache.unflatten(0, (num_blocks, -1))  # a kernel may take smaller ones
        for block in blocks:
            by_block[block].zero_()
