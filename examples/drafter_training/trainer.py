"""Train a drafter step by step. Training can be interrupted and resumed."""

import copy
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from drafter_training.blocks import cut_blocks, random_anchors
from drafter_training.losses import block_loss, draft_ids
from drafter_training.optimizers import step_all
from drafter_training.sources import Source
from reference.reference_drafter import ReferenceDrafter


@dataclass
class Trainer:
    """A drafter in training.

    `embed` is the target's embedding, `head` the rows of its head for tokens that can be drafted.
    """

    drafter: ReferenceDrafter
    embed: nn.Module
    head: torch.Tensor
    optimizers: list[torch.optim.Optimizer]
    peak: float
    """Learning rate."""
    rows: int = 16
    anchors: int = 24
    """Sequences of a step, and blocks cut from each."""
    sizes: tuple[int, ...] = ()
    """Possible rows of a block; one choice for each step. Empty: the drafter's block size."""
    negatives: int | None = None
    """Random tokens, new in each step, that the labels compete with; None: all tokens."""
    dtype: torch.dtype = torch.bfloat16
    averages: bool = False
    """Whether to keep an average over the newest steps, which is the better drafter."""
    step: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0
    """Time spent on steps: by the clock, and of all cores together."""
    length: float = 1.0
    """Tokens a step in training, averaged over some hundred steps."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.average = copy.deepcopy(self.drafter) if self.averages else self.drafter

    def advance(self, source: Source, rate: float) -> None:
        """Make a step at `rate` times the peak learning rate."""
        started, used = time.monotonic(), time.process_time()
        pairs, features = source.draw(self.rng, self.rows)
        anchors = [random_anchors(pair, self.rng, self.anchors) for pair in pairs]
        spec = self.drafter.spec
        size = self.rng.choice(self.sizes or (spec.block_size,))
        blocks = cut_blocks(pairs, anchors, size, spec.mask_token_id).on(self.head.device)
        columns = self.columns(draft_ids(self.drafter, blocks.labels))
        loss, hits = block_loss(
            self.drafter, blocks, features, self.embed, self.head, self.dtype, columns
        )
        loss.backward()
        step_all(self.optimizers, self.drafter, self.peak * rate)
        self.step += 1
        length = 1 + hits.long().cumprod(-1).sum(-1).float().mean().item()
        self.length += (length - self.length) / min(self.step, 100)
        if self.averages:
            share = 1 / min(self.step, 200)
            with torch.no_grad():
                for mean, newest in zip(
                    self.average.parameters(), self.drafter.parameters(), strict=True
                ):
                    mean.lerp_(newest, share)
        self.seconds += time.monotonic() - started
        self.core_seconds += time.process_time() - used

    def columns(self, labels: torch.Tensor) -> torch.Tensor | None:
        """Choose columns of the head: those of the labels, and random others as negatives."""
        if self.negatives is None:
            return None
        seed = torch.Generator().manual_seed(self.rng.getrandbits(32))
        others = torch.randperm(len(self.head), generator=seed)[: self.negatives]
        return torch.cat([labels[labels != -100], others.to(labels.device)]).unique()

    def save(self, file: Path) -> None:
        """Save all that is needed to resume. An existing file is replaced whole, or not at all."""
        partial = file.with_suffix(".partial")
        state = {
            "drafter": learned(self.drafter),
            "average": learned(self.average),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "core_seconds": self.core_seconds,
            "length": self.length,
            "rng": self.rng.getstate(),
        }
        torch.save(state, partial)
        os.replace(partial, file)

    def load(self, file: Path) -> None:
        """Resume from a saved state."""
        state = torch.load(file, map_location=self.head.device, weights_only=False)
        self.drafter.load_state_dict(state["drafter"], strict=False)
        self.average.load_state_dict(state["average"], strict=False)
        for optimizer, kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        self.step, self.length = state["step"], state["length"]
        self.seconds, self.core_seconds = state["seconds"], state["core_seconds"]
        self.rng.setstate(state["rng"])


def learned(drafter: ReferenceDrafter) -> dict[str, torch.Tensor]:
    """Parameters that training changes. The others may be set differently when it is resumed."""
    return {name: one for name, one in drafter.named_parameters() if one.requires_grad}
