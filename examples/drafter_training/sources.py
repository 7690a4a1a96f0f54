"""Sources of training text and of the target's hidden states for it."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from drafter_training.continuations import Pair


class Source(Protocol):
    """Text by the target, with its hidden states."""

    def draw(self, rng: random.Random, count: int) -> tuple[list[Pair], torch.Tensor]:
        """Draw `count` pairs, and features [R, T, m * H] of their tokens, padded at the end."""
        ...


@torch.no_grad()
def features_of(target: PreTrainedModel, ids: torch.Tensor, taps: Sequence[int]) -> torch.Tensor:
    """Return the concatenated outputs of the layers `taps`, for ids [R, T]: [R, T, m * H]."""
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    return torch.cat([hidden[tap + 1] for tap in taps], dim=-1)


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Pad rows [T, ...] of different lengths with zeros at the end: [R, T, ...]."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Live:
    """Runs the target over every batch."""

    def __init__(self, target: PreTrainedModel, taps: Sequence[int], pairs: list[Pair]) -> None:
        self.target, self.taps, self.pairs = target, taps, pairs
        self.tokens = sum(len(continuation) for _, continuation in pairs)

    def draw(self, rng: random.Random, count: int) -> tuple[list[Pair], torch.Tensor]:
        """Draw random pairs."""
        pairs = rng.sample(self.pairs, count)
        ids = padded([torch.tensor(prompt + continuation) for prompt, continuation in pairs])
        return pairs, features_of(self.target, ids.to(self.target.device), self.taps)


class Cached:
    """Runs the target over every text once, and keeps its features on disk, in bf16.

    Texts come in pieces. A piece is processed when it is asked for, so that training need not wait
    for all of them.
    """

    def __init__(self, target: PreTrainedModel, taps: Sequence[int], folder: Path) -> None:
        """Keep features in this folder, one file for each piece, 2 * m * H bytes a token."""
        self.target, self.taps, self.folder = target, taps, folder
        self.rows: list[tuple[Pair, torch.Tensor]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str, pairs: list[Pair]) -> None:
        """Add a piece. Texts are sorted by length."""
        lengths = [len(prompt) + len(continuation) for prompt, continuation in pairs]
        width = self.target.config.hidden_size * len(self.taps)
        file = self.folder / f"{name}.bf16"
        if not file.exists():
            self._write(file, pairs)
        mapped = torch.from_file(str(file), size=sum(lengths) * width, dtype=torch.bfloat16)
        self.rows += zip(pairs, mapped.view(-1, width).split(lengths), strict=True)
        self.rows.sort(key=lambda row: len(row[1]))

    def _write(self, file: Path, pairs: list[Pair]) -> None:
        partial = file.with_suffix(".partial")
        with partial.open("wb") as out:
            for prompt, continuation in pairs:
                ids = torch.tensor([prompt + continuation], device=self.target.device)
                features = features_of(self.target, ids, self.taps)[0].cpu()
                out.write(features.bfloat16().view(torch.uint8).numpy().tobytes())
        partial.rename(file)

    def draw(self, rng: random.Random, count: int) -> tuple[list[Pair], torch.Tensor]:
        """Draw pairs of similar length: computing on padding is wasted."""
        start = rng.randrange(max(1, len(self.rows) - 4 * count))
        rows = rng.sample(self.rows[start : start + 4 * count], count)
        return [pair for pair, _ in rows], padded([one.float() for _, one in rows])
