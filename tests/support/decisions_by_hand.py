"""The device's decisions and learning, written out request by request in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from support.ratios_by_hand import Ratios
from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.planning.acceptance import TRUST
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT

TOO_CLOSE = 1e-5
"""Difference of two promises that rounding may swap."""


@dataclass
class Held:
    """Contents of a slot."""

    width: int
    source: int = NO_DRAFTS
    match: int = 0
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    trust: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for each in (self.confidence, self.trust):
            each.extend([0.0] * self.width)
        self.tokens.extend([0] * self.width)


class DecisionsByHand:
    """Decisions for S slots with K drafts each."""

    def __init__(self, num_slots: int, width: int) -> None:
        self.width = width
        self.ratios = Ratios(num_slots), Ratios(num_slots)
        self.slots = [Held(width) for _ in range(num_slots)]

    def forget(self, slot: int) -> None:
        self.slots[slot] = Held(self.width)
        for each in self.ratios:
            each.forget(np.array([slot]))

    def choose(
        self,
        slot: int,
        sampled: int,
        last: int,
        given: list[int],
        confidence: list[float] | None,
        found: tuple[list[int], int] | None,
        decided: int,
    ) -> tuple[list[int], list[float]]:
        """Choose one request's drafts; return their tokens and chances. `found`: tokens and match;
        `decided`: the device's choice, for close calls."""
        width, held = self.width, Held(self.width)
        self.slots[slot] = held
        held.tokens = [last] * width
        if not sampled:
            return given, [0.0] * width
        chances = [[0.0] * width, [0.0] * width]
        of_block, of_text = (float(each.ratio(np.array([slot]))[0]) for each in self.ratios)
        if confidence is not None:
            held.confidence = [one if one > 0 else -1.0 for one in confidence]
            chances[0] = [min(of_block * max(one, 0.0), 1.0) for one in held.confidence]
        if found is not None:
            tokens, held.match = found
            length = width if held.match else 0
            held.tokens = tokens if held.match else [last] * width
            trusted = [TRUST[min(held.match + one, len(TRUST) - 1)] for one in range(width)]
            held.trust = [one if place < length else 0.0 for place, one in enumerate(trusted)]
            chances[1] = [
                max(1.0 - of_text * (1.0 - one), 0.0) if one > 0 else 0.0 for one in held.trust
            ]
        promises = [sum(accumulate(each, mul)) for each in chances]
        uses_text = promises[1] > promises[0]
        if abs(promises[1] - promises[0]) < TOO_CLOSE:
            uses_text = decided == TEXT
        held.source = NO_DRAFTS if confidence is None else BLOCK
        result = [last] * width if confidence is None else given
        if uses_text:
            held.source, result = TEXT, held.tokens
        return result, chances[int(uses_text)]

    def grade(
        self, slots: list[int], sampled: list[int], rejected: list[int], texts: list[list[int]]
    ) -> list[list[float]]:
        """Grade drafts. `texts`: of each request; returns its outcomes."""
        graded: tuple[list[tuple[int, float, int]], ...] = ([], [])
        outcomes = []
        for slot, produced, refused, text in zip(slots, sampled, rejected, texts, strict=True):
            held, verified, tells, num_correct = self.slots[slot], 0, 0, 0
            admitted = produced - 1 + refused if produced else 0
            if held.source != NO_DRAFTS:
                verified = admitted
            if held.source == BLOCK and verified:
                tried = min(produced, verified)
                expected = sum(max(one, 0.0) for one in held.confidence[:tried])
                graded[0].append((slot, expected, produced - 1))
            if held.match and produced:
                compared = tells = 1
                if held.source == TEXT and verified:
                    compared, tells = verified, min(produced, self.width)
                newest = text[len(text) - produced :]
                while num_correct < tells and newest[num_correct] == held.tokens[num_correct]:
                    num_correct += 1
                right = min(num_correct, compared)
                tried = min(right + 1, compared)
                expected = sum(1.0 - one for one in held.trust[:tried])
                graded[1].append((slot, expected, tried - right))
            length = self.width if held.match else 0
            accepted = produced - 1 if verified else 0
            counts = (
                held.source,
                admitted,
                held.match,
                length,
                tells,
                num_correct,
                verified,
                accepted,
            )
            outcomes.append([*counts, 0, 0, 0, *held.confidence])  # no tree was cut
            held.source, held.match = NO_DRAFTS, 0
        for ratio, each in zip(self.ratios, graded, strict=True):
            ratio.record(
                np.array([slot for slot, _, _ in each], np.int64),
                np.array([expected for _, expected, _ in each]),
                np.array([accepted for _, _, accepted in each], np.int64),
            )
        return outcomes

    def check(self, slots: DraftSlots) -> None:
        """Check that the device holds the same in all slots."""
        blocks, texts = (each.requests.tolist() for each in self.ratios)
        expected = [
            [
                each.source,
                each.match,
                *blocks[slot],
                *texts[slot],
                *each.confidence,
                *each.trust,
                *each.tokens,
            ]
            for slot, each in enumerate(self.slots)
        ]
        np.testing.assert_allclose(slots.records.cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
        overall = [each.overall.tolist() for each in self.ratios]
        np.testing.assert_allclose(slots.overall.cpu().numpy(), overall, rtol=1e-5, atol=1e-5)
