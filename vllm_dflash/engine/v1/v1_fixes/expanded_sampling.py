"""On CPU, drafts are verified with temperature, top-k and top-p of uninitialised memory.

Delete this file when `_expand_kernel_impl` writes into its output
(docs/engineering/upstream.md#expanded_samplingpy).
"""

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler


def fix_expanded_sampling() -> None:
    """Rebind the function in this process, a CPU worker."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    `x`: one value per request, [R]; `cu_num_tokens`: running total of draft tokens, [R].

    Returns:
        One value per draft token, [num_tokens], in the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
