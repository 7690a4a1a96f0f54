"""Draft trees are verified by sampling: lossless at any temperature.

Behind the bonus token and behind every node a token is sampled from the target's distribution, as
plain decoding would. The way goes down from the bonus token as long as the sampled token is a
child. So each token of the output was sampled from what the target says behind the ones before it;
which nodes there are was decided before any of them was sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.sample.rejection_sampler import apply_sampling_constraints
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash.engine.block_layout import Ints
from vllm_dflash.engine.v1.draft_trees import DraftTrees
from vllm_dflash.engine.vllm_fixes.undrafted_sampling import DraftRejectionSampler


class TreeRejectionSampler(DraftRejectionSampler):
    """vLLM's for chains, and that for trees."""

    def attach(self, trees: DraftTrees, settle: Callable[[], None]) -> TreeRejectionSampler:
        """`settle` is called once accepted nodes are known."""
        self.trees, self._settle = trees, settle
        return self

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Logits [T + R, V] of T drafts and R bonus rows to tokens [R, 1 + K]."""
        step = self.trees.step
        if step is None:
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        num_rows = 1 + np.array(metadata.num_draft_tokens)  # of each request, [R]
        branches = np.isin(np.arange(len(num_rows)), [*step.trees])
        branching = num_rows * branches
        rows = np.flatnonzero(np.repeat(branches, num_rows))
        own = logits[torch.from_numpy(rows)].float()  # before vLLM uses them up
        output = super().forward(metadata, draft_probs, logits, sampling_metadata)
        sampled = sample_rows(
            own, branching, sampling_metadata, use_fp64_gumbel=self.use_fp64_gumbel
        ).numpy()
        tokens = output.sampled_token_ids
        for request, kept in step.descend(sampled):
            tokens[request] = -1
            tokens[request, : len(kept)] = torch.from_numpy(kept.astype(np.int32))
        self._settle()
        return output


def sample_rows(
    logits: torch.Tensor,
    counts: Ints,
    sampling_metadata: SamplingMetadata,
    *,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """A token of each row as its request samples, [Q].

    Args:
        logits: float32, request by request, [Q, V]; used up.
        counts: rows of each request of the batch, [R].
        sampling_metadata: of the batch.
        use_fp64_gumbel: as vLLM's samplers have it.
    """
    greedy = logits.argmax(dim=-1)
    if sampling_metadata.all_greedy:
        return greedy
    ends = torch.from_numpy(np.cumsum(counts))
    probabilities = apply_sampling_constraints(logits, ends, sampling_metadata).softmax(dim=-1)
    found = random_sample(probabilities, {}, use_fp64_gumbel)
    is_greedy = (sampling_metadata.temperature == 0).repeat_interleave(torch.from_numpy(counts))
    return torch.where(is_greedy, greedy, found)
