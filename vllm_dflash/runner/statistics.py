"""What a worker counts while it drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_dflash.runner.block_layout import Ints


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

    def observe_verification(self, drafted: Ints, produced: Ints) -> None:
        """Count one verified batch: drafts and produced tokens (bonus included), [R] each."""
        # A request whose sample was discarded verified nothing.
        verified = (drafted > 0) & (produced > 0)
        self.verifications += int(verified.sum())
        self.draft_tokens += int(drafted[verified].sum())
        self.accepted_tokens += int(produced[verified].sum() - verified.sum())

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
