"""Steps of decoding requests: what the device decides and learns, beside plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.utils.math_utils import next_power_of_2

from support.decisions_by_hand import DecisionsByHand
from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade, learn_overall
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT

CPU = torch.device("cpu")
LONGEST_TEXT = 200
UNTOUCHED = 7.0
LEFT = 3.0
"""What rows behind a batch hold of an earlier, larger one."""


@dataclass
class Case:
    """Steps of `num_requests` requests with K drafts each."""

    num_requests: int
    width: int
    steps: int = 8


class World:
    """Decoding requests: the device's slots beside Python's."""

    def __init__(
        self, num_slots: int, width: int, seed: int, where: torch.device | str = CPU
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.num_slots, self.width, self.where = num_slots, width, torch.device(where)
        self.device = DraftSlots(num_slots, width, self.where)
        self.by_hand = DecisionsByHand(num_slots, width)
        self.chances: list[tuple[torch.Tensor, list[float]]] = []
        """All chances found, with those expected."""
        self.texts = self.random.integers(0, 3, (num_slots, LONGEST_TEXT)).astype(np.int32)
        self.total_len = self.random.integers(1, 20, num_slots).astype(np.int32)
        self.last_sampled = torch.zeros(num_slots, 1, dtype=torch.int64)
        self.counted = np.zeros((2, 4), np.int64)

    def there(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Return the arrays on the device."""
        return [torch.from_numpy(each).to(self.where) for each in arrays]

    def step(self, num_requests: int, *, has_block: bool = True, has_text: bool = True) -> None:
        """Grade the last drafts, then choose new ones."""
        batch = self.random.permutation(self.num_slots)[:num_requests]
        if num_requests and self.random.random() < 0.3:
            fresh = self.random.choice(batch)
            self.device.forget(torch.tensor([fresh], device=self.where))
            self.by_hand.forget(int(fresh))
        sampled, rejected = self.verify(batch)
        self.grade(batch, sampled, rejected)
        self.choose(batch, sampled, has_block=has_block, has_text=has_text)

    def verify(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample tokens, some of them drafted or predicted; return counts, sampled and rejected."""
        # Not rows of one array: their alignment would depend on the batch.
        sampled, rejected = (np.zeros(len(batch), np.int32) for _ in range(2))
        for request, slot in enumerate(batch):
            if self.random.random() < 0.2:
                continue  # in its prompt
            held = self.by_hand.slots[slot]
            admitted = self.random.integers(0, self.width + 1)
            # A placeholder is never accepted.
            most_accepted = admitted * (held.source != NO_DRAFTS)
            accepted = self.random.integers(0, most_accepted + 1)
            sampled[request], rejected[request] = 1 + accepted, admitted - accepted
            new = self.random.integers(0, 3, 1 + accepted)
            if held.match and self.random.random() < 0.8:
                new[:accepted] = held.tokens[:accepted]
            start = self.total_len[slot]
            self.texts[slot, start : start + len(new)] = new
            self.total_len[slot] += len(new)
            self.last_sampled[slot] = int(new[-1])
        return sampled, rejected

    def grade(self, batch: np.ndarray, sampled: np.ndarray, rejected: np.ndarray) -> None:
        slots, num_sampled, refused = self.there(batch, sampled, rejected)
        there = self.on_device(batch, sampled)
        shape = len(there.slots), OUTCOME_COLUMNS + self.width
        outcomes = torch.full(shape, LEFT, device=self.where)
        outcomes[:, 0], outcomes[:, OUTCOME_COLUMNS:] = BLOCK, -LEFT
        self.device.sums[len(batch) :] = LEFT
        behind = outcomes[len(batch) :].tolist()
        expected = self.by_hand.grade(
            batch.tolist(),
            sampled.tolist(),
            rejected.tolist(),
            [self.texts[slot, : self.total_len[slot]].tolist() for slot in batch],
        )
        held = there.slots.clone(), there.num_sampled.clone()
        there.clear()
        counts_before = self.device.counts.clone()
        grade(self.device, there, slots, num_sampled, refused, outcomes)
        # Where graphs find the batch.
        assert torch.equal(there.slots, held[0])
        assert torch.equal(there.num_sampled, held[1])
        assert torch.equal(self.device.counts_before, counts_before)
        learn_overall(self.device, there, outcomes)
        self.counted += self.count(sampled, rejected, expected)
        assert self.device.counts.tolist() == self.counted.tolist()
        np.testing.assert_allclose(outcomes.cpu().numpy(), [*expected, *behind], rtol=1e-6)
        self.by_hand.check(self.device)

    def count(self, sampled: np.ndarray, rejected: np.ndarray, outcomes: Any) -> np.ndarray:
        """Return what a step adds to the counts of drafts from blocks and from texts, [2, 4]."""
        found = np.zeros((2, 4), np.int64)
        for tokens, refused, (source, *more) in zip(sampled, rejected, outcomes, strict=True):
            if tokens and tokens - 1 + refused and source != NO_DRAFTS:
                found[int(source == TEXT), :3] += 1, tokens - 1 + refused, tokens - 1
            found[0, 3] += sum(one < 0 for one in more[OUTCOME_COLUMNS - 1 :])
        return found

    def on_device(self, batch: np.ndarray, sampled: np.ndarray) -> Batch:
        """Return the batch, with at least two rows behind it."""
        behind = next_power_of_2(len(batch) + 2) - len(batch)
        slots, num_sampled, texts, lens = self.there(
            np.append(batch, np.full(behind, -1)),
            np.append(sampled, np.zeros(behind, np.int32)),
            self.texts,
            self.total_len,
        )
        return Batch(slots, num_sampled, texts, lens, self.last_sampled.to(self.where))

    def choose(
        self, batch: np.ndarray, sampled: np.ndarray, *, has_block: bool, has_text: bool
    ) -> None:
        width, count = self.width, len(batch)
        blocks = self.random.integers(0, 3, (count + 1, width))
        confidence = self.random.random((count + 1, width)).astype(np.float32)
        for row in np.flatnonzero(self.random.random(count + 1) < 0.3):  # not finite somewhere
            first = self.random.integers(0, width)
            confidence[row, first:] = self.random.choice([0.0, math.nan])
        tokens = self.random.integers(0, 3, (count + 1, width))
        matches = self.random.integers(2, 33, count + 1)
        matches[self.random.random(count + 1) < 0.2] = 0
        for row in range(count):
            if self.random.random() < 0.5:  # both predict the same, up to somewhere
                same = self.random.integers(0, width + 1)
                tokens[row, :same] = blocks[row, :same]
        found = TextLookUp(count + 1, 8, width, self.where)
        found.tokens.copy_(torch.from_numpy(tokens))
        found.matches.copy_(torch.from_numpy(matches))
        given, promised = self.there(blocks.copy(), confidence)
        there = Drafts(
            given, promised, torch.full((count + 1, width), UNTOUCHED, device=self.where)
        )
        requests = self.on_device(batch, sampled)
        choose(self.device, requests, there, found if has_text else None, has_block=has_block)
        drafts, chances = there.tokens.cpu(), there.chances.cpu()
        source = self.device.records[:, 0].tolist()
        for row, slot in enumerate(batch):
            predicted = tokens[row].tolist(), int(matches[row])
            expected, likely = self.by_hand.choose(
                slot,
                sampled[row],
                int(self.last_sampled[slot]),
                blocks[row].tolist(),
                confidence[row].tolist() if has_block else None,
                predicted if has_text else None,
                int(source[slot]),
            )
            assert drafts[row].tolist() == expected
            np.testing.assert_allclose(chances[row], likely, rtol=1e-5, atol=1e-6)
            self.chances.append((chances[row], likely))
        assert drafts[count].tolist() == blocks[count].tolist()
        assert chances[count].tolist() == [UNTOUCHED] * width
        self.by_hand.check(self.device)


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return chances, found and expected; each step asserts all else, with what slots hold."""
    world = World(case.num_requests + 3, case.width, seed=case.width, where=device)
    for number in range(case.steps):
        has_block, has_text = number % 4 != 3, number % 5 != 4
        world.step(case.num_requests, has_block=has_block, has_text=has_text)
    found, expected = zip(*world.chances, strict=True)
    return torch.stack(found).double(), torch.tensor(expected, dtype=torch.float64)


DECISIONS = Oracle(
    "decisions",
    {
        "K = 7": Case(6, 7),
        "K = 15": Case(6, 15),
        "K = 7, 64 requests": Case(64, 7),
        "K = 15, 256 requests": Case(256, 15),
        "K = 16, 33 requests": Case(33, 16),
    },
    compare,
    dtypes=(torch.float32,),
    interpreted=("K = 7", "K = 15"),
)
