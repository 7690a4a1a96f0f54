"""When to draft although it does not seem to pay, to notice that it does again."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SHARE = 0.015
LEAST_SHARE = 0.002
CLOSE_SHARE = 0.005
"""Where drafting nearly pays, there is more to find out, and less to lose."""


@dataclass
class ProbeSchedule:
    """Probes take at most a share of the time; the share halves with every probe in vain.

    So the intervals between probes grow, from some dozens of steps to a few hundred, and a drafter
    that is never worth it costs the least share of the time in the long run.
    """

    least: float = LEAST_SHARE
    """What the share does not fall below."""
    share: float = FIRST_SHARE
    saved: float = 0.0
    """Seconds that may be spent on probing by now."""
    count: int = 0
    """Probes so far."""

    def is_due(self, step_seconds: float, probe_seconds: float, *, is_close: bool) -> bool:
        """Whether to probe now, after so many more seconds without drafts."""
        share = max(self.share, CLOSE_SHARE) if is_close else self.share
        self.saved += share * step_seconds
        if self.saved < probe_seconds:
            return False
        self.saved = 0.0
        self.count += 1
        self.share = max(self.share / 2, self.least)
        return True

    def refund(self, seconds: float) -> None:
        """The last probe brought tokens worth so much: the next may come so much earlier."""
        self.saved += seconds

    def restart(self) -> None:
        """Drafting pays: should it stop to, begin with short intervals again."""
        self.share, self.saved = FIRST_SHARE, 0.0
