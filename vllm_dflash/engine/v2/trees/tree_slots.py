"""Device state of draft trees: written by one kernel, read by the next.

A tree has up to N nodes. Parents come before their children, and no node is likelier than one
before it. So if a tree is cut, by the number of draft slots or by vLLM's trimming, its first nodes
are still a tree. Node -1 is the bonus token.
"""

from __future__ import annotations

import torch

from vllm_dflash.config.engine_options import TREE_CUTS
from vllm_dflash.config.speculative_settings import MOST_NODES


class TreeSlots:
    """Persistent tensors of S request slots, and of the current batch of R requests."""

    def __init__(self, num_slots: int, width: int, num_nodes: int, device: torch.device) -> None:
        """Allocate trees of up to `num_nodes` (N) nodes, for blocks of `width` (K) drafts."""
        assert 1 <= num_nodes <= MOST_NODES  # a row's ancestors are the bits of a word
        self.num_nodes = num_nodes

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # By slot.
        self.may_branch = zeros(num_slots)
        """Whether a slot's drafts may be a tree (`tree_requests.py`), [S]."""
        self.sizes = zeros(num_slots)
        """Number of nodes of a slot's tree; 0: its drafts are a chain, or it has none, [S]."""
        self.tokens = zeros(num_slots, num_nodes, dtype=torch.int64)
        self.parents = zeros(num_slots, num_nodes)
        self.depths = zeros(num_slots, num_nodes)
        """Depth of each node; a child of the bonus token has 1, [S, N]."""
        self.masks = zeros(num_slots, num_nodes, dtype=torch.int64)
        """Nodes that each node sees, itself and its ancestors: bit j is node j, [S, N]."""
        self.argmax_nodes = zeros(num_slots, dtype=torch.int64)
        """Bits of the nodes that, like all their ancestors, are their position's argmax, [S]."""

        # By request of the current batch.
        self.slots = zeros(num_slots, dtype=torch.int64)
        """Slot of each request, where captured graphs read it, [max R]."""
        self.paths = zeros(num_slots, min(width, num_nodes))
        """Accepted nodes of each request, from the bonus token's child on, [max R, D]; D is min(K,
        N), since no node is deeper."""
        self.path_lens = zeros(num_slots)
        """Number of accepted nodes, [max R]."""
        self.chains = torch.full_like(zeros(num_slots, 2 + len(TREE_CUTS)), -1)
        """Outcome of each request's tree, [max R, 2 + C]: most likely nodes verified; those of them
        accepted one after the other; and for each of `TREE_CUTS`, the tokens that the step would
        have brought with the tree cut to that size or less. -1: it had no tree."""

    def forget(self, slots: torch.Tensor, may_branch: torch.Tensor) -> None:
        """Clear slots that go to new requests, [N] int64, on the device, and set whether these may
        have trees, [N]."""
        self.sizes.index_fill_(0, slots, 0)
        self.may_branch[slots] = may_branch

    def begin(self, slots: torch.Tensor) -> None:
        """Begin a step with requests in these slots, [R] int64: nothing is accepted so far."""
        self.slots[: len(slots)].copy_(slots)
        self.path_lens.zero_()
        self.chains.fill_(-1)
