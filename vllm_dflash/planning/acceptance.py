"""Learns how many drafts are accepted: a drafter's, and those that texts predict.

What a request's next drafts will survive is estimated from two things that its last ones have
shown: how confident they were (`curves`), and how often a draft was accepted beside what its
confidence had promised (`ratio`). Both are a request's own, shrunk towards those of all requests,
where a new request starts.

A text's confidence is how far it has matched up to a draft (`TRUST`): a match of m tokens has
become one of m + j after j drafts came true.
"""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints

PRIOR_TOKENS = 4.0
"""Observations that all requests together are worth for one of them, and a ratio of 1 for all."""
REQUEST_MEMORY, GLOBAL_MEMORY = 0.95, 0.98
"""What is left of the ratio of a request, and of all requests, after one more observed block."""
REQUEST_FADES, GLOBAL_FADES = 8, 32
"""Most steps without drafts for which these ratios fade: old evidence counts little."""
CURVE_RATE = 0.1
"""Weight of the newest block in what is expected of a request's next one."""
TYPICAL_RATE = 0.1
"""Weight of a block in what is expected of new requests; all of a step have 0.5 at most."""
ASSUMED = 0.8
"""Acceptance rate of drafts that is assumed at first."""
TRUST = 1.0 - 0.78 * np.maximum(np.arange(512.0), 1.0) ** -0.76
"""Confidence in the token after a match of this many tokens. In source code, 46% are wrong after a
match of 2, and 16% after one of 8."""
FURTHER = 0.93
"""V2: what is left of a text's expected survival for each draft further on: once that is verified,
the match that promised it is some steps old."""
NEVER = -(1 << 40)


def confidence_of_texts(matches: Ints, lengths: Ints, width: int) -> Floats:
    """Return confidence in what texts predict after matches of so many tokens, [R, width]; 0 after
    a prediction's end.

    Args:
        matches: tokens of each match, [R].
        lengths: tokens of each prediction, [R].
        width: most drafts of a request.
    """
    draft = np.arange(width)
    trust: Floats = TRUST[np.minimum(matches[:, None] + draft, len(TRUST) - 1)]
    return trust * (draft < lengths[:, None])


class Acceptance:
    """What is known about one kind of drafts. Each request has a row."""

    def __init__(self, max_draft: int, num_rows: int, *, of_texts: bool) -> None:
        """Learn about blocks, or texts, of up to K drafts."""
        self.of_texts = of_texts
        assumed = 0.0 if of_texts else ASSUMED
        self.typical: Floats = assumed ** np.arange(1, max_draft + 1)
        """Survival that is expected of a new request's drafts, [K]."""
        self.curves = np.tile(self.typical, (num_rows, 1))
        """Survival that each request's next drafts promise, not corrected, [rows, K]."""
        self.counts = np.zeros((num_rows, 2))
        """Drafts of each request that were lately expected to be accepted (of texts: rejected), and
        that were, [rows, 2]."""
        self.of_all = np.zeros(2)
        """The same of all requests."""
        self.num_observed = np.zeros(num_rows, np.int64)
        """Blocks of each request that were seen."""
        self.last_step = np.full(num_rows, NEVER)
        """Step in which each request's drafts were last verified."""
        self.step = 0
        """Steps so far that were learned from."""
        self._last_of_all = 0

    def forget(self, rows: Ints) -> None:
        """Reset rows that now belong to new requests."""
        self.curves[rows] = self.typical
        self.counts[rows] = 0.0
        self.num_observed[rows], self.last_step[rows] = 0, NEVER

    def ratio(self, rows: Ints) -> Floats:
        """Return what became of tried drafts beside what was expected, [R]: how many of a block's
        were accepted, and how many of a text's rejected."""
        expected, accepted = self.of_all + PRIOR_TOKENS
        found = self.counts[rows]
        return (found[:, 1] + PRIOR_TOKENS * accepted / expected) / (found[:, 0] + PRIOR_TOKENS)

    def survival(self, rows: Ints, confidence: Floats) -> Floats:
        """Return survival of drafts of this confidence, [R, w] both."""
        ratio = self.ratio(rows)[:, None]
        if self.of_texts:
            chances = np.maximum(1.0 - ratio * (1.0 - confidence), 0.0) * (confidence > 0.0)
        else:
            chances = np.minimum(ratio * confidence, 1.0)
        found: Floats = chances.cumprod(axis=1)
        return found

    def expected(self, rows: Ints) -> Floats:
        """Return survival that is expected of R requests' next drafts, [R, K]."""
        if self.of_texts:
            further: Floats = self.curves[rows] * FURTHER ** np.arange(self.curves.shape[1])
            return further
        number = np.arange(1, self.curves.shape[1] + 1)
        found = np.minimum(self.curves[rows] * self.ratio(rows)[:, None] ** number, 1.0)
        # No draft survives longer than the one before it, even where they beat their confidence.
        falling: Floats = np.minimum.accumulate(found, axis=1)
        return falling

    def record_drafts(self, rows: Ints, survival: Floats) -> None:
        """Learn what the new drafts of D requests promise, [D, w]. Drafts that a narrower block
        lacks would have gone on as it did."""
        if not len(rows):
            return
        missing = self.curves.shape[1] - survival.shape[1]
        if missing:
            last, width = survival[:, -1:], survival.shape[1]
            more = last ** (1.0 + np.arange(1, missing + 1) / width)
            survival = np.concatenate([survival, more], axis=1)
        self.curves[rows] += CURVE_RATE * (survival - self.curves[rows])
        weight = min(TYPICAL_RATE * len(rows), 0.5)
        self.typical += weight * (survival.mean(axis=0) - self.typical)
        self.num_observed[rows] += 1

    def record_outcomes(
        self, rows: Ints, confidence: Floats, verified: Ints, accepted: Ints
    ) -> None:
        """Learn what became of the drafts of D requests: of those that were tried, which are the
        accepted ones and the first rejected one.

        Args:
            rows: rows of the requests, [D].
            confidence: confidence of their drafts, [D, w].
            verified: how many were verified, [D].
            accepted: how many were accepted, [D].
        """
        if not len(rows):
            return
        tried = np.minimum(accepted + 1, verified)
        is_tried = np.arange(confidence.shape[1]) < tried[:, None]
        if self.of_texts:
            confidence, accepted = 1.0 - confidence, tried - accepted
        both = np.stack([(confidence * is_tried).sum(axis=1), accepted], axis=1)  # [D, 2]
        idle = np.clip(self.step - self.last_step[rows], 1, REQUEST_FADES)
        self.counts[rows] = (REQUEST_MEMORY**idle)[:, None] * self.counts[rows] + both
        fades = max(len(rows), min(self.step - self._last_of_all, GLOBAL_FADES))
        self.of_all = GLOBAL_MEMORY**fades * self.of_all + both.sum(axis=0)
        self.last_step[rows] = self._last_of_all = self.step
