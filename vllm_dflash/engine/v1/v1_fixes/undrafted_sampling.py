"""A step without drafts is sampled as in plain decoding.

Wrong in vLLM 0.32.0, V1 runner: with a speculative method, `RejectionSampler.forward` verifies even
if no request has drafts. That costs time in every undrafted step, and if a request asks for top-k,
it takes `max()` of an empty tensor, which ends the engine. Not reported yet
(docs/engineering/upstream.md). Delete this file when `RejectionSampler.forward` returns early for
`max_spec_len == 0`.
"""

from __future__ import annotations

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_dflash.engine.v1.v1_fixes.bonus_min_tokens import bonus_rows_by_drafts
from vllm_dflash.engine.v1.v1_fixes.scored_tokens import ScoringRejectionSampler


class DraftRejectionSampler(ScoringRejectionSampler):
    """Replaces vLLM's rejection sampler (`runner.rejection_sampler`) in our worker."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Turn logits [T + R, V] of T drafts and R bonus rows into tokens [R, 1 + K]."""
        if metadata.max_spec_len == 0:
            return self.sample_scored(logits, sampling_metadata)
        with bonus_rows_by_drafts(sampling_metadata, metadata.num_draft_tokens):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
