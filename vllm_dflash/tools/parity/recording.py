"""What an engine did while it drafted for one request, as plain tensors in one file.

Q rows of a block (the bonus token's and k masks'), H hidden size, m taps, T context rows taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

NOT_VERIFIED = -1
NOTHING = torch.empty(0)
"""What a step has before its block has run."""


@dataclass
class DraftStep:
    """One block forward of the engine's drafter."""

    rows_taken: int
    """How many context rows the engine had taken in when this block ran."""
    input_ids: torch.Tensor
    """[Q]."""
    positions: torch.Tensor
    """[Q]."""
    embedding: torch.Tensor = NOTHING
    """[Q, H]."""
    layers: list[torch.Tensor] = field(default_factory=list)
    """Output of each layer, its residual added, [Q, H]."""
    hidden: torch.Tensor = NOTHING
    """Behind the final norm, [Q, H]."""
    logits: torch.Tensor = NOTHING
    """Of the mask rows, [Q - 1, V']; of DFlash 2 those of candidates, [Q - 1, C]."""
    drafts: torch.Tensor = NOTHING
    """Tokens of the target that were drafted, [Q - 1]."""
    num_drafted: int = 0
    """Drafts the target verified; fewer than Q - 1 where the request could not use all."""
    num_accepted: int = NOT_VERIFIED
    candidates: torch.Tensor | None = None
    """Columns of the logits, of DFlash 2, [Q - 1, C]."""


@dataclass
class Recording:
    """All context rows and draft steps of one request, in the order in which they came."""

    features: torch.Tensor
    """Taps, concatenated in ascending layer order, [T, m * H_target]."""
    z: torch.Tensor
    """The same rows fused, as their keys and values were made of them, [T, H]."""
    positions: torch.Tensor
    """[T]. One that occurs twice was stored twice; the later row counts."""
    steps: list[DraftStep]

    def visible_rows(self, step: DraftStep, length: int) -> torch.Tensor:
        """Row of each context position that this step sees, -1 where there is none: [length]."""
        rows = torch.full((length,), -1)
        # Ascending, so that of several rows of one position the last is kept.
        for row, position in enumerate(self.positions[: step.rows_taken].tolist()):
            if position < length:
                rows[position] = row
        return rows

    def save(self, path: Path) -> None:
        """Write a file; inverse of `load`."""
        torch.save({**vars(self), "steps": [vars(step) for step in self.steps]}, path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote."""
        found = torch.load(path, weights_only=True)
        return cls(**{**found, "steps": [DraftStep(**step) for step in found["steps"]]})


@dataclass(frozen=True)
class RecordedRequest:
    """A prompt with what the engine made of it."""

    token_ids: list[int]
    """The prompt and the new tokens."""
    prompt_length: int
    recording: Recording

    def context_lengths(self) -> list[int]:
        """Tokens before the bonus token at each step, by what was accepted so far."""
        lengths = []
        length = self.prompt_length
        for step in self.recording.steps:
            lengths.append(min(length, len(self.token_ids) - 1))
            length += 1 + max(step.num_accepted, 0)
        return lengths
