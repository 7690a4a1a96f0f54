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


class Summary(NamedTuple):
    """Samples that count now, group by group, the best ones first."""

    min_scores: Floats
    """Half-way between the worst score in a group and the best below; of the last, -inf, [G]."""
    kept: Floats
    """Drafts of each request that survive each threshold, of blocks of each width, [G, T, K]."""
    gain: Floats
    """How many of those are accepted, [G, T, K]."""
    mean_first_survival: float
    num_samples: int


@compiled
def summarise(curves: Floats, scores: Floats, order: Ints) -> Summary:
    """Survival, [S, K], and scores, [S], of N samples; `order`: which, the best ones first, [N]."""
    count, width, last = len(order), curves.shape[1], len(THRESHOLDS) - 1
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), MAX_GROUPS)
    kept, gain = np.zeros((2, num_groups, last + 1, width))
    min_scores, first_survival, first = np.full(num_groups, -np.inf), 0.0, 0
    for group in range(num_groups):
        end = (group + 1) * count // num_groups
        for sample in order[first:end]:
            first_survival += curves[sample, 0]
            for draft in range(width):
                survival, number = curves[sample, draft], -1
                for each in range(len(THRESHOLDS)):
                    number += survival >= THRESHOLDS[each]
                kept[group, number, draft] += 1.0
                gain[group, number, draft] += survival
        for means in (kept[group], gain[group]):
            means /= end - first
            for number in range(last, 0, -1):  # what survives a threshold survives lower ones
                means[number - 1] += means[number]
            for draft in range(1, width):
                means[:, draft] += means[:, draft - 1]
        if end < count:
            min_scores[group] = (scores[order[end - 1]] + scores[order[end]]) / 2
        first = end
    return Summary(min_scores, kept, gain, first_survival / count, count)


class Forecast:
    """Expected worth of drafting, from recent survival curves.

    A request's score is how likely its first drafts were to be accepted lately; it is known before
    drafting: the higher, the better its drafts do.
    """

    def __init__(self, max_draft: int, num_rows: int) -> None:
        """Forecast blocks of up to `max_draft` tokens (K)."""
        self._scores = np.zeros(num_rows)
        # A ring of samples: survival, the score of whom it is of, and the step it was made in.
        self._curves = np.zeros((MAX_SAMPLES, max_draft))
        self._sample_scores = np.zeros(MAX_SAMPLES)
        self._born = np.zeros(MAX_SAMPLES, np.int64)
        self.restart()

    def restart(self) -> None:
        """Forget all samples."""
        self._born[:] = -SAMPLE_LIFE
        self._next = self._step = 0
        self._summarise()

    def forget(self, rows: Ints) -> None:
        """Rows that are new requests' from now on."""
        self._scores[rows] = self.summary.mean_first_survival

    def scores(self, rows: Ints) -> Floats:
        """Scores of requests, [R]; step by step they come nearer to everybody's."""
        scores = self._scores[rows]
        scores += SCORE_FADE * (self.summary.mean_first_survival - scores)
        self._scores[rows] = scores
        return scores

    def observe(self, rows: Ints, curves: Floats, samples: Floats | None = None) -> None:
        """Add one step's drafts of D requests: survival of their blocks, and of what came of these
        if that is another, [D, w] each."""
        scores, samples = self._scores[rows], curves if samples is None else samples
        self._scores[rows] = scores + SCORE_RATE * (curves[:, 0] - scores)
        self._step += 1
        places = (self._next + np.arange(len(rows))) % MAX_SAMPLES
        self._next = (self._next + len(rows)) % MAX_SAMPLES
        width, max_draft = samples.shape[1], self._curves.shape[1]
        self._curves[places, :width] = samples
        if width < max_draft:  # a narrower block goes on falling as it did
            last = samples[:, -1:]
            ratio = last ** (1.0 / width)
            self._curves[places, width:] = last * ratio ** np.arange(1, max_draft - width + 1)
        self._sample_scores[places] = scores
        self._born[places] = self._step
        self._unread += len(rows)
        count = self.summary.num_samples
        if self._unread * 8 >= count or count < MANY_SAMPLES:
            self._summarise()

    def _summarise(self) -> None:
        recent = np.flatnonzero(self._born > self._step - SAMPLE_LIFE)
        curves, scores = self._curves, self._sample_scores
        if len(recent) < ENOUGH_SAMPLES:
            assumed = ASSUMED_RATES[:, None] ** np.arange(1, curves.shape[1] + 1)
            curves = np.concatenate([curves[recent], assumed])
            scores = np.append(scores[recent], np.full(len(assumed), ASSUMED_RATES.mean()))
            recent = np.arange(len(scores))
        best_first = recent[np.argsort(-scores[recent], kind="stable")]
        self.summary, self._unread = summarise(curves, scores, best_first), 0


def seen_with_a_block(curves: Floats, found: Floats, promised: Floats) -> Floats:
    """Survival of the drafts that a block's step has brought, [R, K].

    They are the text's where these are better. Where that could not be predicted, it is part of
    what a block's step brings.

    Args:
        curves: of the blocks, [R, K].
        found: of what the texts predicted, [R, K].
        promised: of what they were expected to, [R, K].
    """
    block = curves.sum(axis=1)
    is_surprise = (found.sum(axis=1) > block) & (block >= promised.sum(axis=1))
    return np.where(is_surprise[:, None], found, curves)
