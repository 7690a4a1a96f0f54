"""What drafting will be worth, before it is done.

A draft shows its confidence only once it is made, and is then cut to what pays. So its worth is
not that of an average draft: it is the average, over drafts, of what would be kept of each. Recent
drafts serve as the sample, those of requests that looked alike beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning import Floats, Ints

MAX_SAMPLES = 512
SAMPLE_LIFE = 64
"""Drafted steps after which a sample no longer counts."""
SAMPLES_PER_GROUP = 16
MAX_GROUPS = 4
"""Requests are told apart by at most this many quantiles of their score."""
THRESHOLDS = np.array([0.0, 0.03, 0.07, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
"""Survival from which on a draft may be kept; which one is best depends on the step."""
ASSUMED_RATES = np.array([0.5, 0.7, 0.85, 0.95])
"""Acceptance rates held for possible as long as next to nothing was drafted."""
ENOUGH_SAMPLES, MANY_SAMPLES = 8, 32
"""From the first on assumed rates do not count; up to the second each sample counts at once."""


@dataclass(frozen=True)
class Outcomes:
    """What drafting would bring, for each choice of requests, threshold and width.

    Axes: drafting the requests of the G best groups, the T thresholds, widths 1 to K.
    """

    drafted: Ints
    """Number of requests drafted, [G]."""
    least_score: Floats
    """Requests with at least this score are drafted, [G]."""
    kept: Floats
    """Expected drafts to verify, [G, T, K]."""
    gain: Floats
    """Expected drafts to be accepted, [G, T, K]."""


class Forecast:
    """Expected worth of drafting, from recent survival curves.

    A request's score is any number known before drafting: the higher, the better its drafts do.
    """

    def __init__(self, max_draft: int) -> None:
        self._curves = np.zeros((MAX_SAMPLES, max_draft))
        self._scores = np.zeros(MAX_SAMPLES)
        self._born = np.full(MAX_SAMPLES, -SAMPLE_LIFE)
        self._next = 0
        self._step = 0
        self._summarise()

    def observe(self, scores: Floats, curves: Floats) -> None:
        """Add one step's drafts: scores before drafting [D], survival curves [D, w].

        Positions beyond a narrower block go on falling as the ones before them did.
        """
        self._step += 1
        count, width = curves.shape
        places = (self._next + np.arange(count)) % MAX_SAMPLES
        missing = np.arange(1, self._curves.shape[1] - width + 1)
        ratio = curves[:, -1:] ** (1.0 / width)
        self._curves[places, :width] = curves
        self._curves[places, width:] = curves[:, -1:] * ratio**missing
        self._scores[places] = scores
        self._born[places] = self._step
        self._next = int(places[-1] + 1) % MAX_SAMPLES
        self._unread += count
        if self._unread * 8 >= self._num_samples or self._num_samples < MANY_SAMPLES:
            self._summarise()

    def _summarise(self) -> None:
        """Average over each group of samples: what is kept and gained by threshold and width."""
        recent = self._born > self._step - SAMPLE_LIFE
        curves, scores = self._curves[recent], self._scores[recent]
        if len(curves) < ENOUGH_SAMPLES:
            positions = np.arange(1, self._curves.shape[1] + 1)
            curves = np.concatenate([curves, ASSUMED_RATES[:, None] ** positions])
            scores = np.concatenate([scores, np.full(len(ASSUMED_RATES), ASSUMED_RATES.mean())])
        self._num_samples, self._unread = len(curves), 0
        self.mean_first_survival = float(curves[:, 0].mean())
        order = np.argsort(-scores, kind="stable")  # best first
        curves, scores = curves[order], scores[order]
        num_groups = int(np.clip(len(curves) // SAMPLES_PER_GROUP, 1, MAX_GROUPS))
        starts = np.arange(num_groups) * len(curves) // num_groups
        sizes = np.diff(np.append(starts, len(curves)))[:, None, None]
        kept = curves[:, None, :] >= THRESHOLDS[:, None]  # [N, T, K]
        gained = kept * curves[:, None, :]
        self._kept = np.cumsum(np.add.reduceat(kept, starts) / sizes, axis=2)
        self._gain = np.cumsum(np.add.reduceat(gained, starts) / sizes, axis=2)
        # Where a group begins, half-way between the worst score in it and the best below.
        edges = (scores[starts[1:] - 1] + scores[starts[1:]]) / 2
        self._least = np.append(edges, -np.inf)

    def outcomes(self, scores: Floats) -> Outcomes:
        """What drafting the best of these requests would bring; scores [R]."""
        group = np.searchsorted(-self._least, -scores)  # the first group whose edge they reach
        counts = np.bincount(group, minlength=len(self._least))[:, None, None]
        return Outcomes(
            drafted=np.cumsum(counts),
            least_score=self._least,
            kept=np.cumsum(counts * self._kept, axis=0),
            gain=np.cumsum(counts * self._gain, axis=0),
        )
