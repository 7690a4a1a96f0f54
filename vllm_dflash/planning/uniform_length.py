"""One draft length for the whole batch, chosen a step ahead: what asynchronous scheduling allows.

The next step is scheduled while this one still runs, so nothing that its tokens or its drafter's
confidence would tell is known yet. What is known is how many drafts were accepted by position
lately, and what steps cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.estimates import RANKS, Estimates
from vllm_dflash.planning.planner import CLOSE, MARGIN, PROBE_LENGTH
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.step import Step, StepEstimate
from vllm_dflash.planning.survival import Calibration

OLD_TOKENS = 24.0
"""What all earlier observations are worth beside new ones that contradict them, and to a probe."""
LATELY = 0.97
"""What is left of an observed draft after another one, where luck is compared with expectations."""
LEAST_SURPRISE = 3.0
"""Standard deviations from which on they contradict each other."""
PROBE_SHARE = 0.008
"""Of the time, that probes take in the long run where drafting is never worth it. Each tries all
requests of the batch, so it tells more than one of few requests, and has to come more often."""


class UniformLength:
    """Chooses each step's draft length, from nothing to K, for all requests alike.

    Until it is started, every step drafts K.
    """

    def __init__(self, max_draft: int) -> None:
        """For drafts of up to `max_draft` tokens (K)."""
        self.max_draft = max_draft
        self.costs: StepCosts | None = None
        self.speedup = 1.0
        """Expected rate against plain decoding, with the length that was chosen last."""
        self.probes = ProbeSchedule(PROBE_SHARE)
        self._calibration = Calibration(max_draft)
        self._lately = np.zeros(3)
        """Drafts accepted, expected, and their variance."""
        self._choices = np.arange(max_draft + 1)
        self._trims = False
        self._kept = max_draft
        """Drafts that the device is taken to keep of each request, where it trims them."""
        self._probe_seconds = 0.0
        """What a probe costs, while nobody is drafted otherwise; else 0."""

    def start(self, costs: StepCosts, choices: Iterable[int], *, trims: bool = False) -> None:
        """From now on choose by what steps cost.

        Args:
            costs: to start from.
            choices: lengths that a step can have, 0 and K among them.
            trims: whether the device verifies only those drafts that are worth it. Then a step
                has any length up to K, in effect, and is given K.
        """
        self.costs = costs
        self._trims = trims
        self._choices = np.arange(self.max_draft + 1) if trims else np.array(sorted(choices))

    def estimates(self) -> Estimates:
        """What was learned, for another run to recall. Asked once it is started."""
        assert self.costs is not None
        calibration = self._calibration
        nothing = np.zeros(2), np.zeros(RANKS)
        return Estimates(self.costs, calibration.seen, calibration.accepted, *nothing)

    def recall(self, estimates: Estimates) -> None:
        """Start from what another run has learned of drafts; `start` is given the costs."""
        self._calibration.recall(estimates.seen, estimates.accepted)

    def survival(self) -> Floats:
        """Probability that the first 1 to K drafts are all accepted, [K]."""
        return np.cumprod(self._rates())

    def _rates(self) -> Floats:
        """Probability that each draft is accepted if those before it were, [K]."""
        return self._calibration.acceptance(np.ones((1, self.max_draft)))[0]

    def choose(self, num_requests: int, context: float = 0.0) -> int:
        """Drafts for each of so many requests in the next step.

        Args:
            num_requests: R.
            context: tokens of context of all of them.
        """
        if self.costs is None or not num_requests:
            return self.max_draft
        self.speedup = 1.0
        gain = np.concatenate([[0.0], np.cumsum(self.survival())])[self._choices]
        drafting = self.costs.block(num_requests * (1 + self.max_draft), context)
        rows = num_requests * (1 + self._choices)
        seconds = self.costs.decoding(num_requests, rows, context, context / num_requests)
        seconds = seconds + drafting * (self._choices > 0)
        rates = num_requests * (1 + gain) / seconds
        best = int(rates.argmax())
        if best and rates[best] > MARGIN * rates[0]:
            self.probes.restart()
            self.speedup = float(rates[best] / rates[0])
            self._probe_seconds = 0.0
            return self._draft(best)
        trial = int(np.searchsorted(self._choices, min(PROBE_LENGTH, self.max_draft)))
        self._probe_seconds = float(seconds[trial] - seconds[0])
        is_close = bool(rates[1:].max() > CLOSE * rates[0])
        if self.probes.is_due(float(seconds[0]), self._probe_seconds, is_close=is_close):
            return self._draft(trial)
        return 0

    def _draft(self, choice: int) -> int:
        self._kept = int(self._choices[choice])
        return self.max_draft if self._trims else self._kept

    def observe(self, step: Step) -> StepEstimate | None:
        """Learn from a step: what became of the drafts it verified, and what it took.

        `target_seconds` counts where it is known: it holds the draft whose rows are `draft_rows`,
        because nobody can time that alone while the device works on. Returns what was expected of
        the step without that draft, where it is known.
        """
        known = (step.verified > 0) & step.decoding
        verified, accepted = step.verified[known], step.accepted[known]
        if self._trims:  # which drafts were dropped, only the device knows
            kept = np.clip(self._kept, accepted, verified)
            all_kept = step.verified.copy()
            all_kept[known] = kept
            rows = step.rows - int((verified - kept).sum())
            step, verified = replace(step, rows=rows, verified=all_kept), kept
        if len(verified):
            self._learn_acceptance(step, verified, accepted)
        if self.costs is None or not step.target_seconds:
            return None
        drafting = self.costs.block(step.draft_rows)
        alone = replace(step, target_seconds=step.target_seconds - drafting, draft_rows=0)
        return self.costs.observe(alone)

    def _learn_acceptance(self, step: Step, verified: Ints, accepted: Ints) -> None:
        if self.costs is not None and self._probe_seconds:
            # A probe that has paid for itself can be repeated at once.
            worth = float(accepted.sum()) * self.costs.plain(step.num_requests) / step.num_requests
            self.probes.refund(min(worth, self._probe_seconds))
        if self._contradicts(verified, accepted) or self._probe_seconds:
            self._calibration.keep(OLD_TOKENS)
        # Without a confidence, every draft stands for its position alone.
        self._calibration.observe(np.ones((len(verified), self.max_draft)), verified, accepted)

    def _contradicts(self, verified: Ints, accepted: Ints) -> bool:
        """Whether drafts have fared otherwise of late than what was seen before would have it."""
        rates = self._rates()
        tried = np.arange(self.max_draft) < np.minimum(accepted + 1, verified)[:, None]  # [D, K]
        count = tried.sum(axis=0)
        seen = np.array([accepted.sum(), count @ rates, count @ (rates * (1 - rates))])
        self._lately = LATELY ** count.sum() * self._lately + seen
        lucky, expected, variance = self._lately
        return bool(abs(lucky - expected) > LEAST_SURPRISE * np.sqrt(max(variance, 1.0)))
