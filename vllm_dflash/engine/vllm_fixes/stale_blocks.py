"""Cache blocks that change hands are cleared of what their last owner left, on CPU.

Wrong in vLLM 0.32.0, CPU: the attention kernel, which serves both model runners there, reads a
request's last block to its end. Values behind the context count for nothing, unless one is NaN or
infinite: then the result is NaN, and the request would go undrafted until it has overwritten them.
Not reported yet (docs/engineering/upstream.md). Delete this file when the kernel masks before it
multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def clear_blocks(caches: Iterable[torch.Tensor], num_blocks: int, blocks: list[int]) -> None:
    """Zero these of all `num_blocks` blocks in caches whose first dimension they divide."""
    for cache in caches:
        by_block = cache.unflatten(0, (num_blocks, -1))  # a kernel may take smaller ones
        for block in blocks:
            by_block[block].zero_()
