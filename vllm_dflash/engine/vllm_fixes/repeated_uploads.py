"""V2 uploads the sampling parameters of all request slots in every step.

Delete this file when the call in `add_requests` depends on `scheduled_new_reqs`
(docs/engineering/upstream.md#repeated_uploadspy).
"""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler

NUM_OF_VLLM = 3
"""Logits processors of vLLM's own; a user's may count on a call in each step."""


class UploadingSampler(Sampler):
    """vLLM's sampler; uploads parameters when they have changed."""

    _has_changed = True
    """Whether requests were added since the last upload."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        """Take a new request's parameters."""
        self._has_changed = True
        super().add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Upload the parameters of all slots, if they have changed. Called in every step."""
        if self._has_changed or len(self.logits_processors) != NUM_OF_VLLM:
            super().apply_staged_writes()
            self._has_changed = False
