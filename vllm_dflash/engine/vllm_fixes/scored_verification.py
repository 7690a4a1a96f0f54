"""Requests may ask for log-probabilities of specific tokens (`logprob_token_ids`), also on V2.

Wrong in vLLM 0.32.0 and 0.33.0, Model Runner V2: the rejection sampler ignores this field, so a
step that verifies any request's drafts returns no log-probabilities, or those of the likeliest
tokens. Not reported yet (docs/engineering/upstream.md). Delete this file when
`RejectionSampler._get_logprobs_tensors` gets `logprob_token_ids_state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _flatten_sampled_kernel,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def fix_scored_verification(runner: GPUModelRunner) -> None:
    """Replace the runner's rejection sampler, in a worker whose models are loaded.

    Does nothing if ranks share the sampling of a batch, because vLLM sizes its messages without
    these tokens, or if the model has its own sampler.
    """
    shards = runner.parallel_config.enable_batch_sharded_sampling
    if not shards and type(runner.rejection_sampler) is RejectionSampler:
        runner.rejection_sampler = ScoringVerifier.instead_of(runner.rejection_sampler)


class ScoringVerifier(RejectionSampler):
    """vLLM's rejection sampler; also scores the tokens that requests name, in all their rows."""

    _most_scored = 0
    """Maximum number of tokens to score for a request of the batch."""
    _row_slots: torch.Tensor
    """Slot of each row's request, for the rows being verified, [rows]."""

    @classmethod
    def instead_of(cls, whole: RejectionSampler) -> Self:
        """Make a sampler with the state of vLLM's."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(whole))
        return made

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *others: Any, **more: Any
    ) -> SamplerOutput:
        """Turn logits of all sampled rows into tokens [R, 1 + W]; arguments as in vLLM."""
        state = self.sampler.logprob_token_ids_state
        self._most_scored = state.max_num_token_ids(input_batch.idx_mapping_np)
        return super().__call__(logits, input_batch, *others, **more)

    def _verify(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._row_slots = arguments[7]  # expanded_idx_mapping
        return super()._verify(*arguments)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        if not self._most_scored:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        num_rows, num_reqs = len(logits), len(cu_num_logits) - 1
        tokens = torch.zeros(num_rows, dtype=sampled.dtype, device=sampled.device)
        _flatten_sampled_kernel[(num_reqs,)](
            tokens, sampled, sampled.stride(0), num_sampled, cu_num_logits, num_warps=1
        )
        # If the device trims drafts, only it knows which rows belong to which request.
        trims = self.enable_adaptive_verification
        starts = cu_num_logits.clone() if trims else cu_num_logits_np.tolist()
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            tokens,
            None if num_rows == num_reqs else starts,
            self.sampler.logprob_token_ids_state,
            self._row_slots,
            self._most_scored,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
