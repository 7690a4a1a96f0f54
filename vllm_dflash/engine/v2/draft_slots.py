"""What the device knows of each request's drafts, by slot: written by one kernel, read by the next.

The host sees counts of it, steps later, and sends back what it learned: acceptance rates.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import CONFIDENCE_KNOTS, TRUST, Chances


class DraftSlots:
    """Persistent tensors of S slots with up to K drafts each; zeros for new requests."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        """For S slots and K drafts."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def table(values: Floats) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self.source = zeros(num_slots, dtype=torch.int32)  # [S]: NOBODY, BLOCK or TEXT
        self.confidence = zeros(num_slots, width)  # [S, K]: the drafter's, of its last block
        # Chances that each draft and all before it are accepted, not corrected by bias.
        self.block_survival = zeros(num_slots, width)  # [S, K]
        self.text_survival = zeros(num_slots, width)  # [S, K]
        self.matches = zeros(num_slots, dtype=torch.int32)  # [S]: with agreement
        self.text_lengths = zeros(num_slots, dtype=torch.int32)  # [S]: tokens predicted
        self.text_tokens = zeros(num_slots, width, dtype=torch.int64)  # [S, K]
        # Of blocks and texts, of each slot and (row S) of everybody: decayed tokens expected and
        # accepted.
        self.bias = zeros(2, num_slots + 1, 2)
        fresh = Chances.of(width, 0).rates
        self.rates = table(np.stack((fresh, fresh)))  # [2, K, knots]: of blocks and texts
        self.trust = table(TRUST)  # [512]
        self.knots = table(CONFIDENCE_KNOTS)  # [knots]

    def buffers(self) -> list[torch.Tensor]:
        """What kernels read and write; never allocated again."""
        return [*vars(self).values()]

    def of_drafts(self) -> tuple[torch.Tensor, ...]:
        """What `choose` writes and `grade` reads, in the order of both kernels' arguments."""
        return (
            self.source,
            self.confidence,
            self.block_survival,
            self.text_survival,
            self.matches,
            self.text_lengths,
            self.text_tokens,
            self.bias,
        )

    def forget(self, slots: torch.Tensor) -> None:
        """Slots [N] int64, on the device, are new requests' from now on."""
        for each in (self.source, self.text_lengths):
            each.index_fill_(0, slots, 0)
        self.confidence.index_fill_(0, slots, 0.0)  # is reported whoever the drafts are of
        self.bias.index_fill_(1, slots, 0.0)

    def set_rates(self, block: Floats, text: Floats) -> None:
        """From now on drafts of blocks and texts are accepted at these rates, [K, knots] each.
        Waits for nothing."""
        found = torch.from_numpy(np.stack((block, text)).astype(np.float32))
        if self.rates.is_cuda:
            # New pinned memory each time: PyTorch takes none back before it was copied from.
            found = found.pin_memory()
        self.rates.copy_(found, non_blocking=True)
