"""vLLM's rejection sampler, mended where it fails for us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class DraftRejectionSampler(RejectionSampler):
    """Samples steps without drafts as plain decoding does.

    vLLM's own goes through verification with nothing to verify, which costs time on every
    undrafted step, and fails on an empty tensor where a request asks for top-k.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Logits [T + R, V] of T drafts and R bonus rows to tokens [R, 1 + K]."""
        if metadata.max_spec_len == 0:
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    Args:
        x: one value per request, [R].
        cu_num_tokens: running total of draft tokens, [R].
        num_tokens: their total.
        replace_from: a value that does not pass as it is, but
        replace_to: as this one.

    Returns:
        One value per draft token, [num_tokens], in the dtype of `x`.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts, output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)


@contextmanager
def seeds_spared(runner: GPUModelRunner) -> Iterator[None]:
    """For a step of the V1 runner: rows whose token is thrown away take no numbers from a seed.

    Such are the chunks of a prompt but for its last. vLLM lets them take some and then sets the
    generator back, which a CPU's cannot: one seeded request with a long prompt ends the engine.
    """
    generators = runner.input_batch.generators
    discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    spared = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
    try:
        yield
    finally:
        generators.update(spared)
