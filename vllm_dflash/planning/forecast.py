"""What drafting will be worth, before it is done.

A draft shows its confidence only once it is made, and is then cut to what pays. So its worth is
not that of an average draft: it is the average, over drafts, of what would be kept of each. Recent
drafts serve as the sample, those of requests that looked alike beforehand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.compiled import compiled

SCORE_RATE = 0.5
SCORE_FADE = 0.05
"""Share of the way to everybody's score that a request's goes with each planned step."""
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


@compiled
def add_samples(
    samples: tuple[Floats, Floats, Ints], place: int, step: int, scores: Floats, curves: Floats
) -> int:
    """Write a step's drafts into the ring from a place on; returns where the next ones go.

    Positions beyond a narrower block go on falling as the ones before them did.
    """
    all_curves, all_scores, born = samples
    count, width = curves.shape
    for number in range(count):
        last = curves[number, width - 1]
        ratio = last ** (1.0 / width)
        for position in range(all_curves.shape[1]):
            if position < width:
                all_curves[place, position] = curves[number, position]
            else:
                all_curves[place, position] = last * ratio ** (position - width + 1)
        all_scores[place] = scores[number]
        born[place] = step
        place = (place + 1) % MAX_SAMPLES
    return place


@compiled
def average_groups(curves: Floats, starts: Ints) -> tuple[Floats, Floats]:
    """Average over groups of samples what is kept and gained by threshold and width.

    Args:
        curves: survival of samples, group by group, [N, K].
        starts: where each group begins, and N, [G + 1].

    Returns:
        Drafts kept and gained, [G, T, K] each.
    """
    num_groups, num_thresholds, max_draft = len(starts) - 1, len(THRESHOLDS), curves.shape[1]
    kept = np.zeros((num_groups, num_thresholds, max_draft))
    gain = np.zeros((num_groups, num_thresholds, max_draft))
    for group in range(num_groups):
        share = 1.0 / (starts[group + 1] - starts[group])
        for threshold in range(num_thresholds):
            for sample in range(starts[group], starts[group + 1]):
                for position in range(max_draft):
                    survival = curves[sample, position]
                    if survival < THRESHOLDS[threshold]:
                        break  # it never grows
                    kept[group, threshold, position] += share
                    gain[group, threshold, position] += share * survival
            for position in range(1, max_draft):
                kept[group, threshold, position] += kept[group, threshold, position - 1]
                gain[group, threshold, position] += gain[group, threshold, position - 1]
    return kept, gain


class Summary(NamedTuple):
    """Of the samples that count now, group by group, the best ones first."""

    least_score: Floats
    """Half-way between the worst score in a group and the best below; of the last, -inf, [G]."""
    kept: Floats
    """Drafts kept of each request, [G, T, K]."""
    gain: Floats
    """And gained, [G, T, K]."""
    mean_first_survival: float
    num_samples: int


@compiled
def summarise(samples: tuple[Floats, Floats, Ints], step: int) -> Summary:
    """Of survival curves, scores and the steps they were made in, at a step."""
    all_curves, all_scores, born = samples
    recent = np.nonzero(born > step - SAMPLE_LIFE)[0]
    count, max_draft = len(recent), all_curves.shape[1]
    assumed = len(ASSUMED_RATES) if count < ENOUGH_SAMPLES else 0
    curves, scores = np.empty((count + assumed, max_draft)), np.empty(count + assumed)
    curves[:count], scores[:count] = all_curves[recent], all_scores[recent]
    for number in range(assumed):
        scores[count + number] = ASSUMED_RATES.mean()
        for position in range(max_draft):
            curves[count + number, position] = ASSUMED_RATES[number] ** (position + 1)
    count += assumed
    order = np.argsort(-scores, kind="mergesort")  # a stable one
    curves, scores = curves[order], scores[order]
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), MAX_GROUPS)
    starts = np.arange(num_groups + 1) * count // num_groups
    kept, gain = average_groups(curves, starts)
    least = np.full(num_groups, -np.inf)
    for group in range(num_groups - 1):
        edge = starts[group + 1]
        least[group] = (scores[edge - 1] + scores[edge]) / 2
    return Summary(least, kept, gain, curves[:, 0].mean(), count)


class Forecast:
    """Expected worth of drafting, from recent survival curves.

    A request's score is how likely its first drafts were to be accepted lately; it is known before
    drafting: the higher, the better its drafts do.
    """

    def __init__(self, max_draft: int, num_rows: int) -> None:
        self._scores = np.zeros(num_rows)
        self._samples = (
            np.zeros((MAX_SAMPLES, max_draft)),
            np.zeros(MAX_SAMPLES),
            np.full(MAX_SAMPLES, -SAMPLE_LIFE),
        )
        """Survival curves, scores, and the steps they were made in."""
        self.restart()

    def restart(self) -> None:
        """Forget all samples."""
        self._samples[2][:] = -SAMPLE_LIFE
        self._next = self._step = 0
        self._summarise()

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self._scores[rows] = self.summary.mean_first_survival

    def scores(self, rows: Ints) -> Floats:
        """Of requests, [R]; step by step they come nearer to everybody's."""
        mean = self.summary.mean_first_survival
        self._scores[rows] += SCORE_FADE * (mean - self._scores[rows])
        return self._scores[rows]

    def observe(self, rows: Ints, curves: Floats, samples: Floats | None = None) -> None:
        """Add one step's drafts of D requests: survival of their blocks, and of what came of these
        if that is another, [D, w] each."""
        scores = self._scores[rows]
        self._scores[rows] += SCORE_RATE * (curves[:, 0] - scores)
        self._step += 1
        samples = curves if samples is None else samples
        self._next = add_samples(self._samples, self._next, self._step, scores, samples)
        self._unread += len(curves)
        count = self.summary.num_samples
        if self._unread * 8 >= count or count < MANY_SAMPLES:
            self._summarise()

    def _summarise(self) -> None:
        self.summary, self._unread = summarise(self._samples, self._step), 0
