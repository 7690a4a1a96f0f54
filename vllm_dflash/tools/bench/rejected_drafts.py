"""A proposer without a drafter: each request verifies K drafts in each step, and none is accepted.

vLLM's synthetic acceptance does this on GPUs; its sampler on CPUs has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

DRAFTED = 0
"""The only draft, a token that the target is kept from writing."""


class RejectedDrafts:
    """The proposer that vLLM's method "custom_class" loads; methods are as vLLM calls them."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        speculative = vllm_config.speculative_config
        assert speculative is not None
        self._drafts = [DRAFTED] * speculative.num_speculative_tokens

    def load_model(self, target: torch.nn.Module) -> None:
        """Take the draft from the tokens that the target can write."""
        compute: Any = target.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute(*args, **kwargs)  # [rows, vocabulary]
            if logits is not None:  # one rank has them
                logits[:, DRAFTED] = -float("inf")
            return logits

        target.__dict__["compute_logits"] = compute_logits

    def propose(self, sampled: Sequence[Sequence[int]], *_: Any, **__: Any) -> list[list[int]]:
        """Propose K drafts for each request that sampled a token; others still read prompts."""
        return [self._drafts if tokens else [] for tokens in sampled]
