"""On CPU, NaN in a cache block makes the attention of its next owner NaN.

Delete this file when the kernel masks before it multiplies
(docs/engineering/upstream.md#stale_blockspy).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def clear_blocks(caches: Iterable[torch.Tensor], num_blocks: int, blocks: list[int]) -> None:
    """Zero `blocks` in each cache, whose first dimension holds all `num_blocks` blocks in order."""
    for cache in caches:
        by_block = cache.unflatten(0, (num_blocks, -1))  # a kernel may use smaller blocks
        for block in blocks:
            by_block[block].zero_()
