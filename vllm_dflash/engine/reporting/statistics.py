"""Counters of drafting: one table, from which `/metrics`, `dflash_stats` and the log take their
names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import StepRecord

UNIT = 1e-6
"""Unit of figures in messages: the field in vLLM's statistics holds only integers."""
Figures = dict[str, int]
"""Increase of each counter that increased, in `UNIT`."""


def _counter(about: str, *, is_shown: bool = False) -> Any:
    """A counter that starts at 0 and never decreases; `is_shown`: also at `/metrics`."""
    return field(default=0, metadata={"about": about, "is_shown": is_shown})


def _shown(about: str) -> Any:
    return _counter(about, is_shown=True)


@dataclass
class DraftStatistics:
    """Counters since the engine started. A verification is one request in one step with drafts."""

    max_draft: int
    """Longest draft: K, or nodes of a tree."""
    steps: int = _counter("Steps of the engine with any tokens.")
    drafted_steps: int = _shown("Steps in which the drafter ran.")
    skipped_steps: int = _shown(
        "Steps in which drafts could have been used and the drafter did not run."
    )
    probes: int = _counter(
        "Drafted steps against the plan, which measure drafts that do not seem to pay."
    )
    drafted_requests: int = _shown(
        "Requests of drafted steps whose draft length was chosen, 0 included."
    )
    planned_tokens: int = _shown("Sum of the draft lengths chosen for dflash_drafted_requests.")
    verifications: int = _counter("Requests with verified drafts, summed over steps.")
    draft_tokens: int = _counter("Drafts that the target verified.")
    accepted_tokens: int = _counter("Of those, drafts that were accepted.")
    free_verifications: int = _counter("Verifications of free drafts.")
    free_draft_tokens: int = _shown("Verified free drafts: those copied from text.")
    free_accepted_tokens: int = _shown("Of those, drafts that were accepted.")
    nan_drafts: int = _counter("Drafts dropped because their logits were not finite.")
    step_seconds: float = _shown("Time of all steps that followed another without a pause.")
    draft_seconds: float = _counter("Of it, time of the drafter's blocks.")
    context_seconds: float = _counter("Of it, time of storing context.")
    planning_seconds: float = _shown("Time spent on choosing draft lengths.")
    draft_lengths: Counter[int] = field(default_factory=Counter)
    """How often each length from 0 to K was chosen for a request in a drafted step."""

    def clear(self) -> None:
        """Reset all counters to zero, in place."""
        vars(self).update(vars(DraftStatistics(self.max_draft)))

    def record_outcomes(self, step: StepRecord) -> None:
        """Count the results of the drafts that a step verified."""
        counts = step.decoding & (step.verified > 0)  # a discarded sample verifies nothing
        is_free = counts & (step.verified_free > 0)
        self.verifications += int(counts.sum())
        self.draft_tokens += int(step.verified[counts].sum())
        self.accepted_tokens += int(step.accepted.sum())
        self.free_verifications += int(is_free.sum())
        self.free_draft_tokens += int(step.verified_free[is_free].sum())
        self.free_accepted_tokens += int(step.accepted[is_free].sum())

    def take_counts(self, counts: Ints) -> None:
        """Take what V2's device has counted since the start, [2, 4]: verifications, verified and
        accepted drafts, and drafts that were not finite, of blocks and of texts."""
        both, (_, of_texts) = counts.sum(axis=0).tolist(), counts.tolist()
        self.verifications, self.draft_tokens, self.accepted_tokens, self.nan_drafts = both
        self.free_verifications, self.free_draft_tokens, self.free_accepted_tokens, _ = of_texts

    def record_blocks(self, lengths: Sequence[int], *, any_eligible: bool) -> None:
        """Count a step that drafts blocks of these lengths, [D]; D = 0 if the drafter is idle.

        Makes no arrays: V2's host counts every step, and a fast GPU waits for it.
        """
        count = len(lengths)
        self.steps += 1
        self.drafted_steps += count > 0
        self.skipped_steps += any_eligible and not count
        self.drafted_requests += count
        self.planned_tokens += sum(lengths)
        self.draft_lengths.update(lengths)

    def record_step(self, step: StepRecord) -> None:
        """Count a step that has ended."""
        plan = step.plan
        blocks = np.where(step.from_text, 0, step.lengths)[plan.drafted]
        self.record_blocks(blocks.tolist(), any_eligible=step.any_eligible)
        self.probes += plan.is_probe and plan.runs_block
        self.nan_drafts += step.nan_drafts
        self.record_times(step)

    def record_times(self, step: StepRecord) -> None:
        """Count a step's times."""
        self.step_seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.context_seconds += step.context_seconds
        self.planning_seconds += step.planning_seconds

    def scheduler_counters(self) -> dict[str, Any]:
        """Return what only V2's scheduler counts, to `merge_scheduler_counters` in a worker."""
        return {name: getattr(self, name) for name in OF_SCHEDULER}

    def merge_scheduler_counters(self, counted: dict[str, Any]) -> None:
        """Replace these counters with the scheduler's."""
        vars(self).update(counted)

    def counts(self) -> dict[str, float]:
        """All counters, by name."""
        return {name: getattr(self, name) for name in COUNTERS}

    def to_dict(self) -> dict[str, Any]:
        """Counters and means derived from them, for `dflash_stats`; only plain Python values."""
        count, seconds = self.verifications, self.step_seconds
        return {
            **self.counts(),
            "mean_acceptance_length": 1 + self.accepted_tokens / count if count else 0.0,
            "mean_draft_length": self.draft_tokens / count if count else 0.0,
            "draft_lengths": [self.draft_lengths[length] for length in range(self.max_draft + 1)],
            "planning_share": self.planning_seconds / seconds if seconds else 0.0,
        }


COUNTERS = {each.name: each.metadata["about"] for each in fields(DraftStatistics) if each.metadata}
"""Description of each counter, by name."""
OF_SCHEDULER = "probes", "step_seconds", "planning_seconds"
"""Names of the counters that `DraftStatistics.scheduler_counters` returns."""
METRICS = [each.name for each in fields(DraftStatistics) if each.metadata.get("is_shown")]
"""Names of the counters that are shown at `/metrics`."""


class Increases:
    """Increases of counters, reported once per interval."""

    def __init__(
        self,
        statistics: DraftStatistics,
        interval: float,
        names: Collection[str] = tuple(COUNTERS),
    ) -> None:
        """Report the counters `names`, from zero; `interval` in seconds."""
        self._statistics, self._interval = statistics, interval
        self._due = time.monotonic() + interval
        self._reported = dict.fromkeys(names, 0)

    def tick(self) -> Figures | None:
        """Call after each step. Returns the increases if the interval is over, else None."""
        return None if time.monotonic() < self._due else self.take()

    def take(self) -> Figures:
        """Increases since the last report, due or not: also for the step without tokens that ends
        each of vLLM's busy periods."""
        self._due = time.monotonic() + self._interval
        counts = self._statistics.counts()
        now = {name: round(counts[name] / UNIT) for name in self._reported}
        fresh = {name: more for name in now if (more := now[name] - self._reported[name]) > 0}
        self._reported = now
        return fresh
