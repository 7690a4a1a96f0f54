"""A request may ask for log-probabilities of certain tokens (`logprob_token_ids`), also on V2.

Wrong in vLLM 0.32.0 and 0.33.0, Model Runner V2: the rejection sampler does not read them, so a
step that verifies anybody's drafts answers with no log-probabilities, or with those of the
likeliest tokens. Not reported yet (docs/engineering/upstream.md). Delete this file when
`RejectionSampler._get_logprobs_tensors` is given `logprob_token_ids_state`.
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


def mend_scored_verification(runner: GPUModelRunner) -> None:
    """In a worker whose models are loaded: replace the runner's rejection sampler.

    Does nothing where ranks share a batch, because vLLM sizes its messages without these tokens, or
    where a model brings its own sampler.
    """
    shards = runner.parallel_config.enable_batch_sharded_sampling
    if not shards and type(runner.rejection_sampler) is RejectionSampler:
        runner.rejection_sampler = ScoringVerifier.instead_of(runner.rejection_sampler)


class ScoringVerifier(RejectionSampler):
    """vLLM's, which scores the tokens that a request named in each of its rows."""

    _most_scored = 0
    """Tokens that a request of the batch wants scored, at most."""
    _row_slots: torch.Tensor
    """Slot of each row's request, [rows], of those that are verified next."""

    @classmethod
    def instead_of(cls, whole: RejectionSampler) -> Self:
        """Set up as vLLM's is."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(whole))
        return made

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *others: Any, **more: Any
    ) -> SamplerOutput:
        """Logits of all rows that sample to tokens [R, 1 + W]; vLLM's arguments."""
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
        # Where the device trims, it alone knows which rows are whose.
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
