"""One draft length for the whole batch, chosen a step ahead: what asynchronous scheduling allows.

The next step is scheduled while this one still runs, so nothing that its tokens or its drafter's
confidence would tell is known yet. What is known is how many drafts were accepted by position
lately, and what steps cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from vllm_dflash.planning import Floats
from vllm_dflash.planning.costs import StepCosts, StepEstimate
from vllm_dflash.planning.planner import CLOSE, MARGIN, PROBE_LENGTH
from vllm_dflash.planning.probing import ProbeSchedule
from vllm_dflash.planning.step import Step
from vllm_dflash.planning.survival import Calibration


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
        self.probes = ProbeSchedule()
        self._calibration = Calibration(max_draft)
        self._choices = np.arange(max_draft + 1)

    def start(self, costs: StepCosts, choices: Iterable[int]) -> None:
        """From now on choose among these lengths, 0 and K among them, by what steps cost."""
        self.costs = costs
        self._choices = np.array(sorted(choices))

    def survival(self) -> Floats:
        """Probability that the first 1 to K drafts are all accepted, [K]."""
        return np.cumprod(self._calibration.acceptance(np.ones((1, self.max_draft)))[0])

    def choose(self, num_requests: int) -> int:
        """Drafts for each of so many requests in the next step."""
        if self.costs is None or not num_requests:
            return self.max_draft
        self.speedup = 1.0
        gain = np.concatenate([[0.0], np.cumsum(self.survival())])[self._choices]
        drafting = float(self.costs.draft.at(num_requests * (1 + self.max_draft)))
        seconds = self.costs.decoding(num_requests, num_requests * (1 + self._choices))
        seconds = seconds + drafting * (self._choices > 0)
        rates = num_requests * (1 + gain) / seconds
        best = int(rates.argmax())
        if best and rates[best] > MARGIN * rates[0]:
            self.probes.restart()
            self.speedup = float(rates[best] / rates[0])
            return int(self._choices[best])
        trial = int(np.searchsorted(self._choices, min(PROBE_LENGTH, self.max_draft)))
        cost = float(seconds[trial] - seconds[0])
        is_close = bool(rates[1:].max() > CLOSE * rates[0])
        if self.probes.is_due(float(seconds[0]), cost, is_close=is_close):
            return int(self._choices[trial])
        return 0

    def observe(self, step: Step) -> StepEstimate | None:
        """Learn from a step: what became of the drafts it verified, and what it took.

        `target_seconds` counts where it is known: it holds the draft whose rows are `draft_rows`,
        because nobody can time that alone while the device works on. Returns what was expected of
        the step without that draft, where it is known.
        """
        known = (step.verified > 0) & step.decoding
        verified, accepted = step.verified[known], step.accepted[known]
        if len(verified):
            # Without a confidence, every draft stands for its position alone.
            self._calibration.observe(np.ones((len(verified), self.max_draft)), verified, accepted)
        if self.costs is None or not step.target_seconds:
            return None
        drafting = float(self.costs.draft.at(step.draft_rows)) if step.draft_rows else 0.0
        alone = replace(step, target_seconds=step.target_seconds - drafting, draft_rows=0)
        return self.costs.observe(alone)
