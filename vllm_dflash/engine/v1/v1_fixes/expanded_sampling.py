"""Sampled requests are verified with the temperature, top-k and top-p they asked for.

Wrong in vLLM 0.32.0, CPU: the rejection sampler's `expand_batch_to_tokens` runs
`_expand_kernel_impl`, which fills a converted copy of its output. So temperature, top-k and top-p
of drafted requests are read from uninitialised memory: noise at any temperature above 0, with any
speculative method (8 prompts, 48 tokens each at temperature 1: mean log-probability -2.3 without,
-8 to -10 with speculation). Not reported yet (docs/engineering/upstream.md). Delete this file when
`_expand_kernel_impl` writes into its output.
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
