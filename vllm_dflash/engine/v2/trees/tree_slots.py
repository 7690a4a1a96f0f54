"""What the device knows of draft trees: written by one kernel, read by the next.

A tree has N nodes at most. A parent stands before its children, and no node is likelier than one
before it; so wherever a tree is cut, by a limit of places or by vLLM's trimming, its first nodes
are a tree. Node -1 is the bonus token.
"""

from __future__ import annotations

import torch

from vllm_dflash.config.mode import TREE_CUTS
from vllm_dflash.config.speculative_settings import MOST_NODES


class TreeSlots:
    """Persistent tensors of S request slots, and of the batch of R requests that runs."""

    def __init__(self, num_slots: int, width: int, num_nodes: int, device: torch.device) -> None:
        """For trees of up to `num_nodes` (N) nodes, of blocks of K drafts."""
        assert 1 <= num_nodes <= MOST_NODES  # a row's ancestors are the bits of a word
        self.num_nodes = num_nodes

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Of each slot.
        self.may_branch = zeros(num_slots)
        """Whether its drafts may be a tree: not where vLLM's sampler takes a request's rows to be
        consecutive tokens, [S]."""
        self.sizes = zeros(num_slots)
        """Nodes that its drafts are; 0: they are a chain, or there are none, [S]."""
        self.tokens = zeros(num_slots, num_nodes, dtype=torch.int64)
        self.parents = zeros(num_slots, num_nodes)
        self.depths = zeros(num_slots, num_nodes)
        """From 1, behind the bonus token, [S, N]."""
        self.masks = zeros(num_slots, num_nodes, dtype=torch.int64)
        """What each node sees: bit j is node j, itself and its ancestors, [S, N]."""
        self.likeliest = zeros(num_slots, dtype=torch.int64)
        """Nodes that, like all before them, are the likeliest of their places: their bits, [S]."""

        # Of the batch that runs.
        self.slots = zeros(num_slots, dtype=torch.int64)
        """Slot of each request, where captured graphs read it, [max R]."""
        self.paths = zeros(num_slots, min(width, num_nodes))
        """Accepted nodes of each, from the bonus token's child on, [max R, D]: D = min(K, N), for
        no node is deeper."""
        self.path_lens = zeros(num_slots)
        """How many, [max R]."""
        self.chains = torch.full_like(zeros(num_slots, 2 + len(TREE_CUTS)), -1)
        """How many of the likeliest nodes of each request's tree were verified, and how many of
        these, one after the other, were accepted; and how many tokens the step had brought, had the
        tree been cut to the first of `TREE_CUTS`, or less, and so on; -1: it had no tree, [max R, 2
        + C]."""

    def forget(self, slots: torch.Tensor, may_branch: torch.Tensor) -> None:
        """Slots [N] int64, on the device, are new requests' from now on."""
        self.sizes.index_fill_(0, slots, 0)
        self.may_branch[slots] = may_branch

    def begin(self, slots: torch.Tensor) -> None:
        """A step runs with requests in these slots, [R] int64: nothing is accepted so far."""
        self.slots[: len(slots)].copy_(slots)
        self.path_lens.zero_()
        self.chains.fill_(-1)
