"""What a step on V1 knows of the target's batch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_dflash.engine.block_layout import kept_rows
from vllm_dflash.planning import Ints


class TargetBatch(NamedTuple):
    """Inputs for drafting after the target ran T rows of R requests."""

    features: torch.Tensor
    """Hidden states of the taps, [T, m * H]."""
    positions: torch.Tensor
    """[T]."""
    slots: torch.Tensor
    """Slots of the drafter's cache, [T]."""
    query_start_loc: Ints
    """First row of each request, then the total, [R + 1]."""
    num_rejected: Ints
    """Rejected drafts of each request, which are its last rows, [R]."""
    block_table: torch.Tensor
    """Cache blocks of each request, [R, most of any]."""
    sampled: Ints
    """Tokens that each request got, then -1, [R, most of any]."""
    bonus_ids: Ints
    """Newest token of each request, [R]."""
    texts: Ints
    """All tokens of each request but `sampled`, [R or more, longest] int32."""
    text_limits: Ints
    """Maximum length of each request with free drafts, [R]; 0: it has no text to look up."""
    block_limits: Ints
    """Maximum length of each request with drafts of a block, [R]."""
    most_free: int
    """Maximum number of free drafts per request that a step has room to verify."""

    def kept(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, positions and slots of the rows that were not rejected."""
        rows: slice | torch.Tensor
        if self.num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(self.query_start_loc, self.num_rejected))
        else:  # these rows are contiguous, so no copy is needed
            rows = slice(len(self.features) - int(self.num_rejected[-1]))
        return self.features[rows], self.positions[rows], self.slots[rows]

    def newest_features(self, requests: Ints) -> torch.Tensor:
        """Features of the last row of each of these requests that was not rejected."""
        last_rows = self.query_start_loc[1:] - self.num_rejected - 1
        return self.features[torch.from_numpy(last_rows[requests])]
