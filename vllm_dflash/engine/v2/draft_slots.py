"""What the device knows of drafts: written by one kernel, read by the next.

The host sees counts of it, steps later, and sends back what it learned: acceptance rates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import CONFIDENCE_KNOTS, TRUST, Chances

HEAD = 6
"""Columns of a slot's record before those of its drafts: whose they are (NOBODY, BLOCK or TEXT),
tokens that its text has matched (with agreement, 0: it predicts nothing), and its biases: tokens
expected and accepted of late, decayed, of blocks and of texts."""


class Batch(NamedTuple):
    """A step of R requests, behind the target's. S slots are there for all requests."""

    slots: torch.Tensor
    """Slot of each request, [R]."""
    sampled: torch.Tensor
    """Tokens that each got in this step; 0: it is still in its prompt, [R]."""
    rejected: torch.Tensor
    """Its drafts that were rejected, [R]."""
    texts: torch.Tensor
    """With this step's tokens, [S, L] int32."""
    text_lens: torch.Tensor
    """Tokens that each has, [S] int32."""
    newest: torch.Tensor
    """Last token of each, [S, 1] int64."""


class Drafts(NamedTuple):
    """What a batch is to have verified next; rows behind the batch's are left alone."""

    tokens: torch.Tensor
    """[max R, K] int64."""
    confidence: torch.Tensor
    """Drafter's confidence in its block; 0 where its logits were not finite, [max R, K] float32."""
    chances: torch.Tensor
    """Chance of each draft, if those before it are accepted, [max R, K] float32."""


class DraftSlots:
    """Persistent tensors of S slots with up to K drafts each; zeros for new requests."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        """For S slots and K drafts."""
        self.width = width
        # What was handed over: behind the head, K columns each of the drafter's confidence in its
        # last block (-1: not finite), of survival of the block's drafts and of the text's (chances
        # that all up to there are accepted, not corrected by bias), and of the text's tokens,
        # which are exact up to 2^24.
        self.records = torch.zeros(num_slots, HEAD + 4 * width, device=device)
        # Biases of everybody together, of blocks and of texts.
        self.everybody = torch.zeros(2, 2, device=device)
        # What a step adds to these, of each request, see `grading.py`.
        self.sums = torch.zeros(num_slots, 2, 3, device=device)
        fresh = Chances.of(width, 0).rates
        tables = (np.stack((fresh, fresh)), TRUST, CONFIDENCE_KNOTS)
        self.rates, self.trust, self.knots = (
            torch.tensor(table, dtype=torch.float32, device=device) for table in tables
        )  # [2, K, knots], [512], [knots]

    def forget(self, slots: torch.Tensor) -> None:
        """Slots [N] int64, on the device, are new requests' from now on."""
        self.records.index_fill_(0, slots, 0.0)

    def forget_all(self) -> None:
        """What was learned of requests, and of all together."""
        self.records.zero_()
        self.everybody.zero_()

    def set_rates(self, block: Floats, text: Floats) -> None:
        """From now on drafts of blocks and texts are accepted at these rates, [K, knots] each.
        Waits for nothing."""
        found = torch.from_numpy(np.stack((block, text)).astype(np.float32))
        if self.rates.is_cuda:
            # New pinned memory each time: PyTorch takes none back before it was copied from.
            found = found.pin_memory()
        self.rates.copy_(found, non_blocking=True)
