"""What an engine did while it drafted for one request, as plain tensors in one file.

Q rows of a block (the bonus token's and k masks'), H hidden size, m taps, T context rows taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NOT_VERIFIED = -1


@dataclass
class DraftStep:
    """One block forward of the engine's drafter."""

    rows_taken: int
    """How many context rows the engine had taken in when this block ran."""
    input_ids: torch.Tensor
    """[Q]."""
    positions: torch.Tensor
    """[Q]."""
    embedding: torch.Tensor | None = None
    """[Q, H]."""
    layers: list[torch.Tensor] = field(default_factory=list)
    """Output of each layer, its residual added, [Q, H]."""
    hidden: torch.Tensor | None = None
    """Behind the final norm, [Q, H]."""
    logits: torch.Tensor | None = None
    """Of the mask rows, [Q - 1, V']; of DFlash 2 those of candidates, [Q - 1, C]."""
    drafts: torch.Tensor | None = None
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
        positions = self.positions[: step.rows_taken]
        inside = positions < length
        # Ascending, so that of several rows of one position the last is kept.
        for row, position in enumerate(positions.tolist()):
            if inside[row]:
                rows[position] = row
        return rows

    def save(self, path: Path) -> None:
        """Write a safetensors file; inverse of `load`."""
        tensors = {"features": self.features, "z": self.z, "positions": self.positions}
        for number, step in enumerate(self.steps):
            values = {
                "counts": torch.tensor([step.rows_taken, step.num_drafted, step.num_accepted]),
                "input_ids": step.input_ids,
                "positions": step.positions,
                "embedding": step.embedding,
                "hidden": step.hidden,
                "logits": step.logits,
                "candidates": step.candidates,
                "drafts": step.drafts,
            }
            values |= {f"layer.{i}": layer for i, layer in enumerate(step.layers)}
            for name, value in values.items():
                if value is not None:
                    tensors[f"step.{number}.{name}"] = value.contiguous()
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote."""
        tensors = load_file(path)
        steps: list[DraftStep] = []
        while f"step.{len(steps)}.counts" in tensors:
            prefix = f"step.{len(steps)}."
            step = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            rows_taken, num_drafted, num_accepted = step.pop("counts").tolist()
            num_layers = sum(name.startswith("layer.") for name in step)
            layers = [step.pop(f"layer.{i}") for i in range(num_layers)]
            steps.append(
                DraftStep(
                    rows_taken,
                    layers=layers,
                    num_drafted=num_drafted,
                    num_accepted=num_accepted,
                    **step,
                )
            )
        return cls(tensors["features"], tensors["z"], tensors["positions"], steps)
