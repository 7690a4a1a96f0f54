"""Device state of drafts: written by one kernel, read by the next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.planning.acceptance import TRUST

NUM_RECORD_FIELDS = 6
"""Columns of a slot's record before those of its drafts: their source (`Outcomes.source`); tokens
that the text matched (0: it predicts nothing); and what the ratios are made of, decayed: a block's
drafts expected to be accepted, and accepted; a text's expected to be rejected, and rejected."""


class Batch(NamedTuple):
    """R requests after the target's forward, where captured graphs find them. S is the number of
    slots for all requests."""

    slots: torch.Tensor
    """Slot of each request; -1 past the batch, [R]."""
    num_sampled: torch.Tensor
    """Tokens that each request got in this step; 0: still in its prompt, [R]."""
    texts: torch.Tensor
    """Token ids of each slot, this step's included, [S, L] int32."""
    text_lens: torch.Tensor
    """Length of each text, [S] int32."""
    newest: torch.Tensor
    """Last token of each text, [S, 1] int64."""

    @classmethod
    def allocate(
        cls, num_slots: int, texts: torch.Tensor, text_lens: torch.Tensor, newest: torch.Tensor
    ) -> Batch:
        """Make an empty batch of up to S requests, rounded up to a power of two."""
        rows = next_power_of_2(num_slots)
        slots = torch.full((rows,), -1, dtype=torch.int64, device=texts.device)
        return cls(slots, torch.zeros_like(slots, dtype=torch.int32), texts, text_lens, newest)

    def first(self, count: int) -> Batch:
        """Return the first `count` requests."""
        return self._replace(slots=self.slots[:count], num_sampled=self.num_sampled[:count])

    def clear(self) -> None:
        """Leave no request in the batch."""
        self.slots.fill_(-1)
        self.num_sampled.zero_()


class Drafts(NamedTuple):
    """Drafts that a batch verifies next; rows after the batch's are not written."""

    tokens: torch.Tensor
    """[max R, K] int64."""
    confidence: torch.Tensor
    """Drafter's confidence in its block; 0: logits were not finite, [max R, K] float32."""
    chances: torch.Tensor
    """Chance of each draft, given that those before it are accepted, [max R, K] float32."""


class DraftSlots:
    """Persistent tensors of S slots with up to K drafts each; zeros for new requests."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        """Allocate S slots for K drafts."""
        self.width = width
        # After the NUM_RECORD_FIELDS columns, K columns each:
        # - the drafter's confidence in its last block (-1: not finite);
        # - the confidence in what the text predicts (`TRUST`);
        # - the text's tokens, which float32 holds exactly up to 2^24.
        self.records = torch.zeros(num_slots, NUM_RECORD_FIELDS + 3 * width, device=device)
        # What the ratios of all requests together are made of, of blocks and of texts.
        self.overall = torch.zeros(2, 2, device=device)
        # What each request of a step adds to them (`grading.py`).
        self.sums = torch.zeros(num_slots, 2, 3, device=device)
        # Verifications, verified and accepted drafts, and drafts that were not finite, since the
        # start: of blocks, and of texts. Also as they were before the newest step, which is what
        # the host is sent: the next step may be counted while they are copied.
        self.counts, self.counts_before = torch.zeros(2, 2, 4, dtype=torch.int64, device=device)
        # Confidence in what follows a match of so many tokens, [512].
        self.trust = torch.tensor(TRUST, dtype=torch.float32, device=device)

    def forget(self, slots: torch.Tensor) -> None:
        """Clear slots that go to new requests, [N] int64, on the device."""
        self.records.index_fill_(0, slots, 0.0)

    def forget_all(self) -> None:
        """Clear what was learned of each request, and of all together."""
        self.records.zero_()
        self.overall.zero_()
        self.counts.zero_()
