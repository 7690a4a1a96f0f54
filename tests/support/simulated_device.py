"""The device's knowledge and decisions on V2 (`engine/v2`), in numpy, along recorded texts.

A request is a slot: its text and its place there. Drafts are not tokens here; only how many of them
are right matters, which the recorded text knows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from support.ratios_by_hand import Ratios
from support.recorded_drafts import RecordedDrafts
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.acceptance import TRUST
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT, Outcomes


class Verified(NamedTuple):
    """Outcome of a step's drafts, for R requests."""

    admitted: Ints
    """Drafts that were verified, [R]."""
    produced: Ints
    """Tokens that each request has got, [R]."""
    outcomes: Outcomes


class SimulatedDevice:
    """A device of S slots with at most K drafts each."""

    def __init__(self, drafts: RecordedDrafts, num_slots: int, *, looks_up: bool) -> None:
        self.drafts, self.looks_up, self.width = drafts, looks_up, drafts.width
        self.text, self.place, self.source, self._match, self._length, self._block_true = np.zeros(
            (6, num_slots), np.int64
        )
        self._text_true = np.zeros(num_slots, np.int64)
        self._confidence, self._of_text, self.chances = np.zeros((3, num_slots, self.width))
        self._ratios = Ratios(num_slots), Ratios(num_slots)

    def forget(self, slots: Ints) -> None:
        """Clear these slots for new requests."""
        self.source[slots] = NO_DRAFTS
        self._length[slots] = 0
        self.chances[slots] = 0.0
        for each in self._ratios:
            each.forget(slots)

    def verify(self, slots: Ints, given: Ints, is_fresh: Bools) -> Verified:
        """Verify the drafts of R requests, grade them, and go on in their texts.

        Args:
            slots: of the requests, [R].
            given: draft slots of each, [R].
            is_fresh: whether each has just arrived, [R].
        """
        self.forget(slots[is_fresh])
        admitted = given.copy()
        source = self.source[slots]
        right = np.where(source == BLOCK, self._block_true[slots], self._text_true[slots])
        accepted = np.where(source == NO_DRAFTS, 0, np.minimum(admitted, right))
        length, match = self._length[slots], self._match[slots]
        own = np.where(source == NO_DRAFTS, 0, admitted)
        of_block, of_text = ((source == kind) & (own > 0) for kind in (BLOCK, TEXT))
        known = np.where(of_text, np.minimum(1 + accepted, length), np.minimum(length, 1))
        num_correct = np.minimum(self._text_true[slots], known)
        compared = np.where(of_text, own, 1)
        self._learn(0, slots[of_block], self._confidence, own[of_block], accepted[of_block])
        has = known > 0
        right_ones = np.minimum(num_correct, compared)
        self._learn(1, slots[has], self._of_text, compared[has], right_ones[has])
        confidence = self._confidence[slots]
        became = source, admitted, match, length, known, num_correct, own, accepted
        outcomes = Outcomes(*became, confidence, np.zeros((len(slots), 0), np.int64))
        self.place[slots] += 1 + accepted
        self.source[slots], self._length[slots] = NO_DRAFTS, 0
        return Verified(admitted, 1 + accepted, outcomes)

    def _learn(
        self, kind: int, slots: Ints, confidence: Floats, compared: Ints, accepted: Ints
    ) -> None:
        tried = np.minimum(accepted + 1, compared)
        is_tried, promised = np.arange(self.width) < tried[:, None], confidence[slots]
        if kind:  # what texts predict wrongly is counted
            promised, accepted = 1.0 - promised, tried - accepted
        self._ratios[kind].record(slots, (promised * is_tried).sum(axis=1), accepted)

    def choose(self, slots: Ints, *, runs_block: bool) -> None:
        """Choose the source of R requests' drafts, and how likely each draft is to be accepted."""
        text, place, draft = self.text[slots], self.place[slots], np.arange(self.width)
        confidence = np.zeros((2, len(slots), self.width))
        self._confidence[slots] = 0.0
        if runs_block:
            self._confidence[slots] = self.drafts.confidence[text, place]
            confidence[0] = self._confidence[slots]
            self._block_true[slots] = self.drafts.block_true[text, place]
        if self.looks_up:
            match, length, num_correct = self.drafts.predicted[text, place].T
            self._match[slots], self._length[slots] = match, length
            self._text_true[slots] = num_correct
            trust = TRUST[np.minimum(match[:, None] + draft, len(TRUST) - 1)]
            confidence[1] = trust * (draft < length[:, None])
        self._of_text[slots] = confidence[1]
        of_block, of_text = (each.ratio(slots)[:, None] for each in self._ratios)
        chances = np.minimum(of_block * confidence[0], 1.0)
        of_texts = np.maximum(1.0 - of_text * (1.0 - confidence[1]), 0.0) * (confidence[1] > 0)
        corrected = np.stack([chances, of_texts]).cumprod(axis=2)
        is_text = corrected[1].sum(axis=1) > corrected[0].sum(axis=1)
        chosen = np.where(is_text[:, None], corrected[1], corrected[0])
        self.source[slots] = np.where(is_text, TEXT, BLOCK if runs_block else NO_DRAFTS)
        before = np.concatenate([np.ones((len(slots), 1)), chosen[:, :-1]], axis=1)
        self.chances[slots] = np.divide(chosen, before, out=np.zeros_like(chosen), where=before > 0)
