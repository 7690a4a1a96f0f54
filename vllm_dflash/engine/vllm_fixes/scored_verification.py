"""On V2, steps that verify drafts ignore `logprob_token_ids`.

Delete this file when `RejectionSampler._get_logprobs_tensors` gets `logprob_token_ids_state`
(docs/engineering/upstream.md#scored_verificationpy).
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _flatten_sampled_kernel,
)


class ScoringVerifier(RejectionSampler):
    """vLLM's rejection sampler; also scores the tokens that requests name, in all their rows.
    `DrawingVerifier` sets the two attributes in each step."""

    most_scored = 0
    """Maximum number of tokens to score for a request of the batch."""
    row_slots: torch.Tensor
    """Slot of each row's request, for the rows being verified, [rows]."""

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if not self.most_scored:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        num_rows, num_reqs = len(logits), len(cu_num_logits) - 1
        tokens = torch.zeros(num_rows, dtype=sampled.dtype, device=sampled.device)
        _flatten_sampled_kernel[(num_reqs,)](
            tokens, sampled, sampled.stride(0), num_sampled, cu_num_logits, num_warps=1
        )
        # With vLLM's adaptive verification, only the device knows each request's rows.
        drops = self.enable_adaptive_verification
        starts = cu_num_logits.clone() if drops else cu_num_logits_np.tolist()
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            tokens,
            None if num_rows == num_reqs else starts,
            self.sampler.logprob_token_ids_state,
            self.row_slots,
            self.most_scored,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
