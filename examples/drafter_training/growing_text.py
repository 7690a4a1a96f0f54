"""Text to train on that grows while the target still writes it."""

import random
from pathlib import Path

import torch

from drafter_training.answers import read_piece
from drafter_training.continuations import Pair
from drafter_training.sources import Cached

PASSES = 2.5
"""More text is taken in once this many blocks were drawn for each token of it."""
TAKEN = 64
"""Answers taken in at a time."""


class Growing:
    """Text that grows with the blocks drawn from it, as far as answers are written."""

    def __init__(
        self, cached: Cached, answers: Path, longer_than: int, anchors: int, drawn: int
    ) -> None:
        """Take in answers of more than `longer_than` tokens. The training cuts `anchors` blocks
        from each pair, and has drawn `drawn`."""
        self.cached, self.answers, self.longer_than = cached, answers, longer_than
        self.anchors, self.drawn = anchors, drawn
        self.tokens, self.pieces = 0, 0
        self.waiting: list[tuple[str, list[Pair]]] = []

    def draw(self, rng: random.Random, count: int) -> tuple[list[Pair], torch.Tensor]:
        """Take in more text if it is due, then draw from all of it."""
        self.drawn += count * self.anchors
        while self.tokens * PASSES < self.drawn and self.is_more():
            name, pairs = self.waiting.pop(0)
            self.cached.take(name, pairs)
            self.tokens += sum(len(answer) for _, answer in pairs)
        return self.cached.draw(rng, count)

    def is_more(self) -> bool:
        """Return whether there is more text to take in."""
        piece = self.answers / f"{self.pieces:03}.jsonl"
        if not self.waiting and piece.exists():
            pairs = [pair for pair in read_piece(piece) if len(pair[1]) > self.longer_than]
            starts = range(0, len(pairs), TAKEN)
            self.waiting = [(f"{piece.stem}-{one:03}", pairs[one : one + TAKEN]) for one in starts]
            self.pieces += 1
        return bool(self.waiting)
