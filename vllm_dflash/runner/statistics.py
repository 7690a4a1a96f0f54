"""What a worker counts while it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class DraftStatistics:
    """Counters since the engine started. A verification is one request in one step with drafts."""

    steps: int = 0
    """Steps of the engine that sampled or prefilled anything."""
    drafted_steps: int = 0
    """Steps in which the drafter's block forward ran."""
    verifications: int = 0
    draft_tokens: int = 0
    """Drafts the target verified (as vLLM counts them; drafts never scheduled do not count)."""
    accepted_tokens: int = 0
    nan_drafts: int = 0
    """Drafts thrown away because their logits were not finite."""

    def observe_verification(
        self, num_draft_tokens: Sequence[int], num_valid_tokens: Sequence[int]
    ) -> None:
        """Count one verified batch: drafts and produced tokens (bonus included) per request."""
        for drafted, produced in zip(num_draft_tokens, num_valid_tokens, strict=True):
            # A request whose sample was discarded (an aborted prefill) verified nothing.
            if drafted > 0 and produced > 0:
                self.verifications += 1
                self.draft_tokens += drafted
                self.accepted_tokens += produced - 1

    def to_dict(self) -> dict[str, Any]:
        """Counters and the means derived from them; plain values only."""
        count = self.verifications
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": 1 + self.accepted_tokens / count if count else 0.0,
            "mean_draft_length": self.draft_tokens / count if count else 0.0,
            "nan_drafts": self.nan_drafts,
        }
