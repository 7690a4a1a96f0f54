"""On V1, top-k without drafts or `logprob_token_ids` with them can end the engine.

Delete this file when `RejectionSampler` returns early for `max_spec_len == 0` and reads
`logprob_token_ids` (docs/engineering/upstream.md#rejection_samplingpy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

Scored = dict[int, list[int]]
"""Tokens to score, by the request's index in the batch."""
ALL = -1
"""`max_num_logprobs` with which vLLM's sampler returns the whole vocabulary, [R, V]."""


class DraftRejectionSampler(RejectionSampler):
    """Replaces vLLM's rejection sampler (`runner.rejection_sampler`) in our worker; also scores the
    tokens that requests name, in all their rows."""

    _scored: Scored | None = None
    """Tokens to score in this step."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Turn logits [T + R, V] of T drafts and R bonus rows into tokens [R, 1 + K]."""
        self._scored = sampling_metadata.logprob_token_ids
        if metadata.max_spec_len == 0:
            return self._sample_undrafted(logits, sampling_metadata)
        if self._scored:
            most = sampling_metadata.max_num_logprobs or 0
            sampling_metadata = replace(
                sampling_metadata, logprob_token_ids=None, max_num_logprobs=most
            )
        return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _sample_undrafted(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Turn logits [R, V] of a step without drafts into tokens [R, 1].

        Each request's only row is its bonus row; vLLM's thinking budgets need to know.
        """
        if not self._scored:
            return self.sampler(logits, metadata, predict_bonus_token=True)
        most = metadata.max_num_logprobs or 0
        metadata = replace(metadata, logprob_token_ids=None, max_num_logprobs=ALL)
        output = self.sampler(logits, metadata, predict_bonus_token=True)
        values = output.logprobs_tensors.logprobs  # [R, V]
        sampled = output.sampled_token_ids[:, 0].long()
        found = self.sampler.gather_logprobs(values, most, sampled)
        output.logprobs_tensors = with_scored(
            found, self._scored, 1, lambda row: values[row : row + 1]
        )
        return output

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: SpecDecodeMetadata,
        logits: torch.Tensor,
        target_logits: torch.Tensor,
        bonus_logits: torch.Tensor,
        sampled_token_ids: torch.Tensor,
    ) -> LogprobsTensors:
        found = super()._get_logprobs_tensors(
            max_num_logprobs, metadata, logits, target_logits, bonus_logits, sampled_token_ids
        )
        if not self._scored:
            return found
        ends = metadata.cu_num_draft_tokens.tolist()

        def values_of(request: int) -> torch.Tensor:
            drafted = slice(ends[request] - metadata.num_draft_tokens[request], ends[request])
            own = torch.cat([target_logits[drafted], bonus_logits[request : request + 1]]).float()
            return own if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(own)

        return with_scored(found, self._scored, sampled_token_ids.shape[1], values_of)


def with_scored(
    found: LogprobsTensors,
    scored: Scored,
    width: int,
    values_of: Callable[[int], torch.Tensor],
) -> LogprobsTensors:
    """Replace the most likely tokens of requests with their scored tokens.

    Args:
        found: sampled and most likely tokens, [R * width, 1 + most].
        scored: tokens by request.
        width: rows per request in `found`.
        values_of: a request's own rows, [at most width, V].
    """
    wanted = 1 + max(map(len, scored.values()))
    more = 0, max(0, wanted - found.logprobs.shape[1])
    ids = F.pad(found.logprob_token_ids, more)
    values = F.pad(found.logprobs, more, value=-torch.inf)
    for request, tokens in scored.items():
        own = values_of(request)
        rows = slice(request * width, request * width + len(own))
        ids[rows, 1 : 1 + len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        values[rows, 1 : 1 + len(tokens)] = own[:, tokens]
    return found._replace(logprob_token_ids=ids, logprobs=values)
