"""What drafting will be worth, before it is done.

A draft shows its confidence only once it is made, and is then trimmed to what pays. So its worth is
not that of an average draft. It is the average, over drafts, of what would be kept of each. Recent
drafts of requests that looked alike beforehand serve as the sample.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.objective import worth_of
from vllm_dflash.planning.thresholds import THRESHOLDS

SCORE_RATE = 0.5
SCORE_FADE = 0.05
"""Share of the way to the mean score that a request's score moves in each planned step."""
MAX_SAMPLES = 512
SAMPLE_LIFE = 64
"""Drafted steps after which a sample no longer counts."""
SAMPLES_PER_GROUP = 16
MAX_GROUPS = 4
"""Most groups of requests, which are told apart by quantiles of their score."""
ASSUMED_RATES = np.array([0.5, 0.7, 0.85, 0.95])
"""Acceptance rates considered possible while next to nothing was drafted."""
ENOUGH_SAMPLES, MANY_SAMPLES = 8, 32
"""Samples from which on assumed rates do not count, and up to which each sample counts at once."""


class Summary(NamedTuple):
    """Samples that count now, by group, the best groups first."""

    min_scores: Floats
    """Half-way between a group's worst score and the best one below; -inf for the last, [G]."""
    kept: Floats
    """Drafts per request that are worth each threshold, in blocks of each width, [G, T, K]."""
    gain: Floats
    """What those are worth together, [G, T, K]."""
    mean_first_worth: float
    num_samples: int


@compiled
def summarise(curves: Floats, scores: Floats, order: Ints) -> Summary:
    """Summarise N samples: worth, [S, K], and scores, [S]; `order`: which, best first, [N]."""
    count, width, last = len(order), curves.shape[1], len(THRESHOLDS) - 1
    num_groups = min(max(count // SAMPLES_PER_GROUP, 1), MAX_GROUPS)
    kept, gain = np.zeros((2, num_groups, last + 1, width))
    min_scores, first_worth, first = np.full(num_groups, -np.inf), 0.0, 0
    for group in range(num_groups):
        end = (group + 1) * count // num_groups
        for sample in order[first:end]:
            first_worth += curves[sample, 0]
            for draft in range(width):
                worth, number = curves[sample, draft], -1
                for each in range(len(THRESHOLDS)):
                    number += worth >= THRESHOLDS[each]
                kept[group, number, draft] += 1.0
                gain[group, number, draft] += worth
        for means in (kept[group], gain[group]):
            means /= end - first
            for number in range(last, 0, -1):  # what is above a threshold is above lower ones
                means[number - 1] += means[number]
            for draft in range(1, width):
                means[:, draft] += means[:, draft - 1]
        if end < count:
            min_scores[group] = (scores[order[end - 1]] + scores[order[end]]) / 2
        first = end
    return Summary(min_scores, kept, gain, first_worth / count, count)


@compiled
def group_of(summary: Summary, score: float) -> int:
    """Return the group of a request with this score."""
    group = 0
    while score < summary.min_scores[group]:
        group += 1
    return group


class Forecast:
    """Expected worth of drafting, from recent survival curves.

    A request's score is how likely its first drafts were to be accepted lately. It is known before
    drafting. The higher it is, the better the request's drafts do.
    """

    def __init__(self, max_draft: int, num_rows: int, *, fair: bool = False) -> None:
        """Forecast blocks of up to `max_draft` tokens (K); `fair`: the objective."""
        self._fair = fair
        self._scores = np.zeros(num_rows)
        # A ring of samples: worth, the score of the request, and the step it was made in.
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
        """Reset rows that now belong to new requests."""
        self._scores[rows] = self.summary.mean_first_worth

    def scores(self, rows: Ints) -> Floats:
        """Return the scores of requests, [R]; each step moves them closer to the mean."""
        scores = self._scores[rows]
        scores += SCORE_FADE * (self.summary.mean_first_worth - scores)
        self._scores[rows] = scores
        return scores

    def observe(self, rows: Ints, curves: Floats, samples: Floats | None = None) -> None:
        """Add one step's drafts of D requests: survival of their blocks, and of the drafts that
        resulted if these are different, [D, w] each."""
        samples = curves if samples is None else samples
        scores, first = self._scores[rows], worth_of(curves[:, :1], self._fair)[:, 0]
        self._scores[rows] = scores + SCORE_RATE * (first - scores)
        self._step += 1
        places = (self._next + np.arange(len(rows))) % MAX_SAMPLES
        self._next = (self._next + len(rows)) % MAX_SAMPLES
        width, max_draft = samples.shape[1], self._curves.shape[1]
        if width < max_draft:  # a narrower block goes on falling as it did
            last = samples[:, -1:]
            ratio = last ** (1.0 / width)
            more = last * ratio ** np.arange(1, max_draft - width + 1)
            samples = np.concatenate([samples, more], axis=1)
        self._curves[places] = worth_of(samples, self._fair)
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
            curves = np.concatenate([curves[recent], worth_of(assumed, self._fair)])
            mean = worth_of(ASSUMED_RATES[:, None], self._fair).mean()
            scores = np.append(scores[recent], np.full(len(assumed), mean))
            recent = np.arange(len(scores))
        best_first = recent[np.argsort(-scores[recent], kind="stable")]
        self.summary, self._unread = summarise(curves, scores, best_first), 0


def drafts_with_block(curves: Floats, found: Floats, promised: Floats) -> Floats:
    """Return survival of the drafts that a step with a block yields, [R, K].

    If a text's drafts turn out to be better, and this was not predicted, the step yields those.

    Args:
        curves: survival of the blocks' drafts, [R, K].
        found: survival of what the texts predicted, [R, K].
        promised: survival that was expected of the texts, [R, K].
    """
    block = curves.sum(axis=1)
    is_surprise = (found.sum(axis=1) > block) & (block >= promised.sum(axis=1))
    return np.where(is_surprise[:, None], found, curves)
