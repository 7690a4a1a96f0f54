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
    StepRecord,
)


class DraftLearner:
    """What is known about the drafts of an engine's requests."""

    def __init__(self, max_draft: int, max_requests: int, most_free: int) -> None:
        """Learn about blocks of K drafts, and texts that predict up to `most_free` (F)."""
        # Twice the batch: what is known of requests that wait to be run again is kept.
        num_rows, self.max_draft, self.most_free = 2 * max_requests, max_draft, most_free
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(num_rows))
        self._last_rows: tuple[Sequence[str], Ints] = ((), np.zeros(0, np.int64))
        self.blocks = Acceptance(max_draft, num_rows, of_texts=False)
        self.texts = Acceptance(most_free, num_rows, of_texts=True)
        # V1: the drafts that each request was handed over last: what made them, how many, and their
        # confidence, by row.
        self._source, self._handed = np.zeros((2, num_rows), np.int64)
        self._confidence = np.zeros((num_rows, max(max_draft, most_free)))

    def rows(self, ids: Sequence[str]) -> Ints:
        """Return the rows of R requests in what is known, [R]. Those that are not in the batch are
        forgotten when rows run out."""
        if ids == self._last_rows[0]:
            return self._last_rows[1]
        unknown = [name for name in ids if name not in self._row_of]
        if len(unknown) > len(self._free_rows):
            for name in self._row_of.keys() - set(ids):
                self._free_rows.append(self._row_of.pop(name))
        if unknown:
            fresh = np.array([self._free_rows.pop() for _ in unknown])
            self._row_of.update(zip(unknown, fresh.tolist(), strict=True))
            self.blocks.forget(fresh)
            self.texts.forget(fresh)
            self._handed[fresh] = 0
        rows = np.fromiter((self._row_of[name] for name in ids), np.int64)
        self._last_rows = ids, rows
        return rows

    def _hand_over(self, rows: Ints, is_text: Bools, lengths: Ints, confidence: Floats) -> None:
        """Remember the drafts that R requests are handed over, [R] and [R, w]."""
        self._source[rows] = np.where(is_text, TEXT, BLOCK) * (lengths > 0)
        self._handed[rows], self._confidence[rows] = lengths, confidence

    def learn_drafts(self, step: StepRecord) -> None:
        """Learn what became of the drafts that V1's step verified, and of what texts predicted.

        Drafts that are not ours teach nothing: the scheduler pads some requests that it admits, or
        resumes after taking their drafts.
        """
        rows, predicted = self._begin(step), step.predicted
        is_own = (step.verified > 0) & (step.verified == self._handed[rows])
        source = np.where(is_own, self._source[rows], NO_DRAFTS)
        confidence = self._confidence[rows]
        self._learn(rows, source, step.verified, step.accepted, (confidence, confidence))
        if predicted is not None:
            first = confidence_of_texts(predicted.last_matches, predicted.num_observed, 1)[:, 0]
            self._learn_first(rows, source, first, predicted.num_observed, predicted.num_correct)
        self._handed[rows] = 0

    def learn_outcomes(self, step: StepRecord, outcomes: Outcomes) -> None:
        """Learn what became of the drafts that V2's step verified; those are two steps old."""
        rows, verified = self._begin(step), outcomes.verified_in_chain
        matches, text_lengths = outcomes.matches, outcomes.text_lengths
        found = confidence_of_texts(matches, text_lengths, self.max_draft)  # [R, K]
        made = outcomes.confidence[:, 0] > 0.0
        self.blocks.record_drafts(rows[made], outcomes.confidence[made].cumprod(axis=1))
        source = np.where(verified > 0, outcomes.source, NO_DRAFTS)
        self._learn(rows, source, verified, outcomes.accepted, (outcomes.confidence, found))
        self._learn_first(rows, source, found[:, 0], outcomes.num_observed, outcomes.num_correct)
        seen = step.decoding
        self.texts.record_drafts(rows[seen], self.texts.survival(rows[seen], found[seen]))

    def _begin(self, step: StepRecord) -> Ints:
        """Count a step that is learned from. Returns the rows of its requests, [R]."""
        self.blocks.step += 1
        self.texts.step = self.blocks.step
        return self.rows(step.ids)

    def _learn(
        self,
        rows: Ints,
        source: Ints,
        verified: Ints,
        accepted: Ints,
        confidence: tuple[Floats, Floats],
    ) -> None:
        """Learn what became of R requests' verified drafts: what made them, how many there were and
        how many were accepted, [R] each; their confidence, if a block or a text made them, [R, w].
        """
        kinds = (BLOCK, self.blocks), (TEXT, self.texts)
        for (kind, learned), own in zip(kinds, confidence, strict=True):
            some = source == kind
            learned.record_outcomes(rows[some], own[some], verified[some], accepted[some])

    def _learn_first(
        self, rows: Ints, source: Ints, confidence: Floats, num_observed: Ints, num_correct: Ints
    ) -> None:
        """Learn from the first token that a text predicted where other drafts were verified. The
        number of tokens that a step yields shows how easy they were, so the rest says nothing."""
        others = (num_observed > 0) & (source != TEXT)
        first = np.minimum(num_correct[others], 1)
        self.texts.record_outcomes(
            rows[others], confidence[others, None], np.ones_like(first), first
        )

    def ratios_of_blocks(self, ids: Sequence[str]) -> Floats:
        """Return accepted drafts of R requests' blocks for each expected one, [R]."""
        return self.blocks.ratio(self.rows(ids))
