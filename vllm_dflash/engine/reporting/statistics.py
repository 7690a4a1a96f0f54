"""What a worker counts while it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Step, StepEstimate


@dataclass
class CostRecord:
    """One kind of time: sums of what was estimated beforehand and of what was measured."""

    count: int = 0
    estimated: float = 0.0
    measured: float = 0.0

    def add(self, estimated: float, measured: float, times: int = 1) -> None:
        """So many more, seconds each."""
        self.count += times
        self.estimated += times * estimated
        self.measured += times * measured

    def to_dict(self) -> dict[str, float]:
        """Means in milliseconds."""
        milli = 1000.0 / max(self.count, 1)
        return {
            "estimated": round(self.estimated * milli, 3),
            "measured": round(self.measured * milli, 3),
        }


@dataclass
class DraftStatistics:
    """Counters since the engine started. A verification is one request in one step with drafts."""

    max_draft: int
    """K."""
    steps: int = 0
    """Steps of the engine that sampled or prefilled anything."""
    drafted_steps: int = 0
    """Steps in which anybody was drafted."""
    skipped_steps: int = 0
    """Steps in which somebody could have used drafts and nobody was drafted."""
    probes: int = 0
    """Drafted steps that were only to see how drafts would do."""
    verifications: int = 0
    draft_tokens: int = 0
    """Drafts the target verified (as vLLM counts them; drafts never scheduled do not count)."""
    accepted_tokens: int = 0
    free_verifications: int = 0
    """Of the verifications, those of free drafts, which a request's text predicted."""
    free_draft_tokens: int = 0
    free_accepted_tokens: int = 0
    nan_drafts: int = 0
    """Drafts thrown away because their logits were not finite."""
    seconds: float = 0.0
    """Time of all steps that followed another without a pause."""
    draft_seconds: float = 0.0
    context_seconds: float = 0.0
    planning_seconds: float = 0.0
    draft_lengths: Ints = field(init=False)
    """How often each length from 0 to K was chosen for a request in a drafted step, [K + 1]."""
    costs: dict[str, CostRecord] = field(init=False)
    predicted_tokens: float = 0.0
    produced_tokens: float = 0.0
    plain_tokens: float = 0.0
    """Tokens of decoding steps: as planned, as they came, and as plain decoding would have
    produced in the same time by the cost model."""

    def __post_init__(self) -> None:
        self.draft_lengths = np.zeros(self.max_draft + 1, dtype=np.int64)
        self.costs = {name: CostRecord() for name in ("step", "draft", "context")}

    def clear(self) -> None:
        """Count from zero again, for everybody who reads these."""
        vars(self).update(vars(DraftStatistics(self.max_draft)))

    def observe_verification(self, step: Step) -> None:
        """Count what became of the drafts that a step verified."""
        # A request whose sample was discarded verified nothing.
        verified = step.verified[step.decoding]
        self.verifications += int((verified > 0).sum())
        self.draft_tokens += int(verified.sum())
        self.accepted_tokens += int(step.accepted.sum())
        is_free = step.verified_free > 0
        self.free_verifications += int((is_free & step.decoding).sum())
        self.free_draft_tokens += int(step.verified_free[step.decoding].sum())
        self.free_accepted_tokens += int(step.accepted[is_free].sum())

    def observe_uniform(self, length: int, num_requests: int, *, could_draft: bool = True) -> None:
        """Count a step in which all of so many requests were given the same draft length."""
        self.steps += 1
        self.drafted_steps += length > 0
        self.skipped_steps += could_draft and length == 0
        if length:
            self.draft_lengths[length] += num_requests

    def observe(self, step: Step, estimate: StepEstimate | None) -> None:
        """Count a step that is over; `estimate` is what its time was expected to be."""
        plan = step.plan
        self.steps += 1
        self.drafted_steps += plan.width > 0
        self.skipped_steps += step.could_draft and plan.width == 0
        self.probes += plan.is_probe
        self.nan_drafts += step.nan_drafts
        if plan.width:
            blocks = np.where(step.from_text, 0, step.lengths)[plan.drafted]
            self.draft_lengths += np.bincount(blocks, minlength=self.max_draft + 1)
        self.observe_time(step, estimate)

    def observe_time(self, step: Step, estimate: StepEstimate | None) -> None:
        """Count what a step took; `estimate` is what was expected."""
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.context_seconds += step.context_seconds
        self.planning_seconds += step.planning_seconds
        self.compare(step, estimate)

    def compare(self, step: Step, estimate: StepEstimate | None) -> None:
        """Count how a step's time was estimated, if it was."""
        if estimate is None:
            return
        self.costs["step"].add(estimate.target_seconds, step.target_seconds, step.count)
        if step.draft_rows:
            self.costs["draft"].add(estimate.draft_seconds, step.draft_seconds)
        if step.context_rows:
            self.costs["context"].add(estimate.context_seconds, step.context_seconds)
        seconds = step.target_seconds + step.draft_seconds + step.context_seconds
        plain = step.count * step.num_requests * seconds / estimate.plain_seconds
        self.plain_tokens += plain
        self.predicted_tokens += plain * step.plan.speedup
        self.produced_tokens += step.count * step.num_requests + int(step.accepted.sum())

    def figures(self) -> dict[str, float]:
        """What a dashboard takes ratios of; none of them ever decreases."""
        lengths = np.arange(self.max_draft + 1)
        return {
            "drafted_steps": self.drafted_steps,
            "skipped_steps": self.skipped_steps,
            "drafted_requests": int(self.draft_lengths.sum()),
            "planned_tokens": int(self.draft_lengths @ lengths),
            "free_draft_tokens": self.free_draft_tokens,
            "free_accepted_tokens": self.free_accepted_tokens,
            "step_seconds": self.seconds,
            "planning_seconds": self.planning_seconds,
            "produced_tokens": self.produced_tokens,
            "expected_tokens": self.predicted_tokens,
            "plain_tokens": self.plain_tokens,
        }

    def to_dict(self) -> dict[str, Any]:
        """Counters and the means derived from them; plain values only."""
        count = self.verifications
        plain = self.plain_tokens
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "skipped_steps": self.skipped_steps,
            "probes": self.probes,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "free_verifications": self.free_verifications,
            "free_draft_tokens": self.free_draft_tokens,
            "free_accepted_tokens": self.free_accepted_tokens,
            "mean_acceptance_length": 1 + self.accepted_tokens / count if count else 0.0,
            "mean_draft_length": self.draft_tokens / count if count else 0.0,
            "draft_lengths": self.draft_lengths.tolist(),
            "nan_drafts": self.nan_drafts,
            "costs_ms": {name: record.to_dict() for name, record in self.costs.items()},
            "predicted_speedup": self.predicted_tokens / plain if plain else 0.0,
            "measured_speedup": self.produced_tokens / plain if plain else 0.0,
            "seconds": {
                "steps": self.seconds,
                "draft": self.draft_seconds,
                "context": self.context_seconds,
                "planning": self.planning_seconds,
            },
            "planning_share": self.planning_seconds / self.seconds if self.seconds else 0.0,
        }
