"""Steps that go against the plan, to learn whether it is right: when they are due.

What is not done is not measured: a planner that does not draft cannot see that drafting pays again,
and one that drafts in every step cannot see what plain decoding takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning.costs import num_octaves
from vllm_dflash.planning.step import StepRecord

FIRST_SHARE, LEAST_SHARE = 0.015, 0.002
CLOSE_SHARE = 0.005
"""Share of the time for probes: of the first one, in the long run, and where drafting nearly pays,
as there is more to find out then, and less to lose."""


@dataclass
class ProbeSchedule:
    """When to draft although it does not seem to pay, to notice when it pays again.

    Probes take at most a share of the time; the share halves with every probe that fails. So the
    intervals between probes grow, from some dozens of steps to a few hundred, and a drafter that is
    never worth it costs the least share of the time in the long run.
    """

    min_share: float = LEAST_SHARE
    """Lower limit of the share."""
    share: float = FIRST_SHARE
    saved: float = 0.0
    """Seconds that may be spent on probing by now."""

    def is_due(self, step_seconds: float, probe_seconds: float, *, is_close: bool) -> bool:
        """Return whether to probe now, after `step_seconds` more seconds without drafts."""
        share = max(self.share, CLOSE_SHARE) if is_close else self.share
        self.saved += share * step_seconds
        if self.saved < probe_seconds:
            return False
        self.saved, self.share = 0.0, max(self.share / 2, self.min_share)
        return True

    def refund(self, seconds: float) -> None:
        """Give back seconds that the last probe earned or saved, so the next may come sooner."""
        self.saved += seconds

    def restart(self) -> None:
        """Reset to short intervals: drafting pays now, and may stop paying."""
        self.share, self.saved = FIRST_SHARE, 0.0


class PlainChecks:
    """When to verify nothing in a step although drafts seem to pay.

    Steps with drafts do not show what steps without them take. A planner that overestimates that
    drafts at a loss, and never finds out.
    """

    FIRST_SHARE, LEAST_SHARE = 0.1, 0.003
    """Share of the time that checks may cost: before the first one, and in the long run."""
    LEAST_LOST, MOST_LOST = 0.15, 1.0
    """Limits of what a check is taken to cost, in steps without drafts: the estimate may be wrong,
    and the more it is, the more a check is needed."""
    KNOWN, UNKNOWN, DOUBTED = 0.5, 0.8, 4.0
    """Factors of the share: after a step without drafts was measured, after any check, as the batch
    may change meanwhile, and after a step that was faster than expected by more than `FASTER`."""
    FASTER = 0.07

    def __init__(self, max_requests: int) -> None:
        octaves = num_octaves(max_requests)
        self._shares, self._saved = np.full(octaves, self.FIRST_SHARE), np.zeros(octaves)

    def are_due(self, num_requests: int, speedup: float, steps: int = 1) -> bool:
        """Return whether to check now, `steps` steps after this was last asked."""
        octave = round(np.log2(num_requests))
        self._saved[octave] += steps * self._shares[octave]
        if self._saved[octave] < min(max(speedup - 1.0, self.LEAST_LOST), self.MOST_LOST):
            return False
        self._saved[octave] = 0.0
        self._change(octave, self.UNKNOWN)
        return True

    def note(self, step: StepRecord, measured: float, expected: float) -> None:
        """Note a step whose seconds are known, and those that were expected of it."""
        if step.rows == step.num_requests:
            is_faster = measured < (1.0 - self.FASTER) * expected
            factor = self.DOUBTED if is_faster else self.KNOWN
            self._change(round(np.log2(step.num_requests)), factor)

    def _change(self, octave: int, factor: float) -> None:
        share = factor * self._shares[octave]
        self._shares[octave] = min(max(share, self.LEAST_SHARE), self.FIRST_SHARE)
