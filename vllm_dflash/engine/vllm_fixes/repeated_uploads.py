"""vLLM uploads the sampling parameters of all request slots in every step.

Slow in vLLM 0.32.0 and 0.33.0, Model Runner V2: `GPUModelRunner.add_requests` calls
`Sampler.apply_staged_writes` whether or not requests were added, a dozen copies of the host's. Only
new requests change them. Not reported yet (docs/engineering/upstream.md). Delete this file when
that call depends on `scheduled_new_reqs`, as the two calls before it do.
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
