"""Learns from every step what became of its drafts; keeps what each request was handed over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.acceptance import Acceptance, confidence_of_texts
from vllm_dflash.planning.step import (
    BLOCK,
    NO_DRAFTS,
    TEXT,
    Outcomes,
    RequestRows,
    StepRecord,
)


class DraftLearner:
    """What is known about the drafts of an engine's requests."""

    def __init__(self, max_draft: int, max_requests: int, most_free: int) -> None:
        """Learn about blocks of K drafts, and texts that predict up to `most_free` (F)."""
        # Twice the batch: what is known of requests that wait to be run again is kept.
        num_rows, self.max_draft = 2 * max_requests, max_draft
        self._requests = RequestRows(num_rows)
        self.blocks = Acceptance(max_draft, num_rows, of_texts=False)
        self.texts = Acceptance(most_free, num_rows, of_texts=True)
        # V1: the drafts that each request was handed over last: what made them, how many, and their
        # confidence, by row.
        self._source, self._handed = np.zeros((2, num_rows), np.int64)
        self._confidence = np.zeros((num_rows, max(max_draft, most_free)))
        self._first_of_text = np.zeros(num_rows)
        """V1: confidence in the first token that each text predicts, by row."""

    def _rows(self, ids: Sequence[str]) -> Ints:
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self.blocks.forget(fresh)
            self.texts.forget(fresh)
            self._handed[fresh] = 0
        return rows

    def _expect_found(self, rows: Ints, matches: Ints, lengths: Ints) -> Floats:
        """Return confidence in what R requests' texts predict, [R, F]."""
        found = confidence_of_texts(matches, lengths, self.texts.curves.shape[1])
        self._first_of_text[rows] = found[:, 0]
        return found

    def _hand_over(self, rows: Ints, is_text: Bools, lengths: Ints, confidence: Floats) -> None:
        """Remember the drafts that R requests are handed over, [R] and [R, w]."""
        self._source[rows] = np.where(is_text, TEXT, BLOCK) * (lengths > 0)
        self._handed[rows], self._confidence[rows] = lengths, confidence

    def learn_drafts(self, step: StepRecord) -> None:
        """Learn what became of the drafts that V1's step verified, and of what texts predicted.

        Drafts that are not ours teach nothing: the scheduler pads some requests that it admits, or
        resumes after taking their drafts.
        """
        rows = self._rows(step.ids)
        self.blocks.step += step.count
        self.texts.step = self.blocks.step
        is_own = (step.verified > 0) & (step.verified == self._handed[rows])
        source = np.where(is_own, self._source[rows], NO_DRAFTS)
        for kind, learned in ((BLOCK, self.blocks), (TEXT, self.texts)):
            some = source == kind
            if some.any():
                became = step.verified[some], step.accepted[some]
                learned.observe_outcomes(rows[some], self._confidence[rows[some]], *became)
        if step.predicted is not None:
            others = (step.predicted.known > 0) & (source != TEXT)
            first = self._first_of_text[rows]
            self._learn_first(rows, others, first, step.predicted.came_true)
        self._handed[rows] = 0

    def _learn_first(self, rows: Ints, others: Bools, confidence: Floats, came_true: Ints) -> None:
        """Learn from the first token that a text predicted where `others` drafts were verified. The
        number of tokens that a step yields shows how easy they were, so the rest says nothing."""
        first = np.minimum(came_true[others], 1)
        self.texts.observe_outcomes(
            rows[others], confidence[others, None], np.ones_like(first), first
        )

    def learn_outcomes(self, step: StepRecord, outcomes: Outcomes) -> None:
        """Learn what became of the drafts that V2's step verified; those are two steps old."""
        rows, width = self._rows(step.ids), self.max_draft
        self.blocks.step += step.count
        self.texts.step = self.blocks.step
        matches, text_lengths = outcomes.matches, outcomes.text_lengths
        found = confidence_of_texts(matches, text_lengths, width)  # [R, K]
        made = outcomes.confidence[:, 0] > 0.0
        self.blocks.observe_drafts(rows[made], outcomes.confidence[made].cumprod(axis=1))
        verified, own = outcomes.verified_in_chain, outcomes.verified_in_chain > 0
        of_block, of_text = ((outcomes.source == kind) & own for kind in (BLOCK, TEXT))
        both = (of_block, self.blocks, outcomes.confidence), (of_text, self.texts, found)
        for some, learned, confidence in both:
            became = verified[some], outcomes.accepted[some]
            learned.observe_outcomes(rows[some], confidence[some], *became)
        others = (outcomes.known > 0) & ~of_text
        self._learn_first(rows, others, found[:, 0], outcomes.came_true)
        seen = step.decoding
        self.texts.observe_drafts(rows[seen], self.texts.survival(rows[seen], found[seen]))

    def ratios_of_blocks(self, ids: Sequence[str]) -> Floats:
        """Return accepted drafts of R requests' blocks for each expected one, [R]."""
        return self.blocks.ratio(self._rows(ids))
