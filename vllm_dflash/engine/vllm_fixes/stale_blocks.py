"""Cache blocks are cleared on CPU when they get a new owner.

Wrong in vLLM 0.32.0, CPU: the attention kernel, which both model runners use there, reads a
request's last block to its end. Values after the context have no effect, unless one is NaN or
infinite: then the result is NaN, and the request would get no drafts until it overwrites them. Not
reported yet (docs/engineering/upstream.md). Delete this file when the kernel masks before it
multiplies.
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
