"""`min_tokens` counts the drafts that come before a bonus token.

Wrong in vLLM 0.32.0 and 0.33.0, V1 runner: bonus rows are sampled as if the step had no drafts. So
stop tokens are masked there even if the drafts before it already reach `min_tokens`, and the text
runs on. Not reported yet (docs/engineering/upstream.md). Delete this file when
`MinTokensLogitsProcessor` also counts drafts for bonus rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata


@contextmanager
def bonus_rows_by_drafts(metadata: SamplingMetadata, num_drafts: Sequence[int]) -> Iterator[None]:
    """Make `min_tokens` count each request's drafts, [R], for bonus rows. For the duration of a
    step's verification."""
    with ExitStack() as stack:
        for processor in metadata.logitsprocs.non_argmax_invariant:
            if isinstance(processor, MinTokensLogitsProcessor) and processor.min_toks:
                processor.apply = partial(mask_bonus_rows, processor, num_drafts)
                stack.callback(delattr, processor, "apply")
        yield


def mask_bonus_rows(
    processor: MinTokensLogitsProcessor, num_drafts: Sequence[int], logits: torch.Tensor
) -> torch.Tensor:
    """Mask stop tokens in bonus rows [R, V] of requests that are still too short there."""
    long_enough = [
        (request, list(stops))
        for request, (least, output, stops, _) in processor.min_toks.items()
        if len(output) + num_drafts[request] >= least
    ]
    kept = [logits[request, stops] for request, stops in long_enough]
    logits = type(processor).apply(processor, logits)
    for (request, stops), values in zip(long_enough, kept, strict=True):
        logits[request, stops] = values
    return logits
