"""Grows draft trees on the device: the N most likely nodes of a block, best first.

A drafter gives candidates for each position of its block, independent of the tokens chosen for the
positions before. A node is a candidate after another node; its survival is the product of the
chances along its path. Best first: the most likely of all possible next nodes is added, and its
child and its next sibling become possible instead. This gives exactly the N most likely nodes,
parents before children.

Nodes with the same parent exclude each other. Each gets the drafter's probability for it, and none
a higher chance than the most likely. A node's survival is corrected by the request's ratio once, so
that this does not change the tree.

vLLM's trimming multiplies chances, draft by draft. So it gets each node's survival divided by that
of the node before it in the list, and the product up to a node is its survival. Survival never
increases along the list, so trimming cuts off its end, and what is left is a tree.

Like a chain, a tree depends only on what was known before its positions were sampled (`choice.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2

from vllm_dflash.engine.v2.choice import ratio_of
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS, Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.planning.acceptance import PRIOR_TOKENS
from vllm_dflash.planning.step import BLOCK

MOST_CANDIDATES = 8
"""Maximum number of candidates for a position of a block."""


class Candidates(NamedTuple):
    """Candidates for the positions of blocks, most likely first."""

    tokens: torch.Tensor
    """[max R, K, C] int64; the first is the block's draft."""
    probabilities: torch.Tensor
    """The drafter's probabilities; 0: its logits were not finite, [max R, K, C] float32."""


@triton.jit
def _grow(  # type: ignore[no-untyped-def]
    slots,  # [R]
    num_sampled,  # [R]
    newest,  # [S, 1]
    chain,  # [max R, K]
    confidence,  # [max R, K]
    chain_chances,  # [max R, K]
    candidates,  # [max R, K, C]
    probabilities,  # [max R, K, C]
    records,  # [S, NUM_RECORD_FIELDS + 3 * K]
    overall,  # [2, 2]
    may_branch,  # [S]
    sizes,  # [S]
    tokens,  # [S, N]
    parents,  # [S, N]
    depths,  # [S, N]
    masks,  # [S, N]
    argmax_nodes,  # [S]
    drafts,  # [max R, W]
    chances,  # [max R, W]
    HAS_BLOCK: tl.constexpr,
    NUM_RECORD_FIELDS: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    C: tl.constexpr,
    PADDED_C: tl.constexpr,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    W: tl.constexpr,
    PADDED_W: tl.constexpr,
    PRIOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    if slot < 0:  # a graph's row past the batch
        return
    record = records + slot * (NUM_RECORD_FIELDS + 3 * K)
    last = tl.load(newest + slot)
    is_running = tl.load(num_sampled + request) > 0
    branches = (
        is_running & (tl.load(may_branch + slot) != 0) & (tl.load(record) == BLOCK) & HAS_BLOCK
    )
    if not branches:
        draft = tl.arange(0, PADDED_W)
        of_chain = request * K + draft
        token = tl.load(chain + of_chain, mask=draft < K, other=0)
        chance = tl.load(chain_chances + of_chain, mask=draft < K, other=0.0)
        # Models read all W ids, so the rest must be valid.
        token = tl.where(draft < K, token, last)
        tl.store(drafts + request * W + draft, token, mask=draft < W)
        tl.store(chances + request * W + draft, chance, mask=draft < W)
        tl.store(sizes + slot, 0)
        return

    # Chance of each candidate after any node of the position before, [positions, ranks].
    position, rank = tl.arange(0, PADDED_K), tl.arange(0, PADDED_C)
    probability = tl.load(confidence + request * K + position, mask=position < K, other=0.0)
    first = tl.where((position < K) & (probability > 0), probability, 0.0)
    at = (request * K + position[:, None]) * C + rank[None, :]
    is_candidate = (position < K)[:, None] & (rank < C)[None, :]
    share = tl.load(probabilities + at, mask=is_candidate, other=0.0)
    chance = tl.minimum(share, first[:, None])
    chance = tl.where((rank == 0)[None, :], first[:, None], chance)

    node = tl.arange(0, PADDED_N)
    # Possible next nodes: at 0 after the bonus token, at i + 1 after node i.
    value = tl.where(node == 0, tl.sum(tl.where(position == 0, first, 0.0), axis=0), 0.0)
    reached = tl.where(node == 0, 1.0, 0.0)
    its_position = tl.zeros([PADDED_N], tl.int32)
    its_rank = tl.zeros([PADDED_N], tl.int32)
    # Nodes so far.
    seen = tl.zeros([PADDED_N], tl.int64)
    parent_of = tl.full([PADDED_N], -1, tl.int32)
    position_of = tl.zeros([PADDED_N], tl.int32)
    rank_of = tl.full([PADDED_N], -1, tl.int32)
    conditional = tl.zeros([PADDED_N], tl.float32)
    firsts = tl.full([], 0, tl.int64)
    ratio = ratio_of(record + 2, overall, PRIOR)
    before = tl.full([], 1.0, tl.float32)
    for number in range(N):
        best = tl.max(value, axis=0)
        chosen = tl.min(tl.where(value == best, node, PADDED_N), axis=0)
        is_chosen, is_new = node == chosen, node == number
        exists = best > 0.0
        parent = tl.where(exists, chosen - 1, -1)
        at_position = tl.sum(tl.where(is_chosen, its_position, 0), axis=0)
        at_rank = tl.sum(tl.where(is_chosen, its_rank, 0), axis=0)
        above = tl.sum(tl.where(is_chosen, reached, 0.0), axis=0)

        bit = tl.full([], 1, tl.int64) << number
        sees = tl.sum(tl.where(node == parent, seen, 0), axis=0) | bit
        seen = tl.where(is_new, sees, seen)
        parent_of = tl.where(is_new, parent, parent_of)
        position_of = tl.where(is_new, tl.where(exists, at_position, 0), position_of)
        rank_of = tl.where(is_new, tl.where(exists, at_rank, -1), rank_of)
        is_first = exists & (at_rank == 0) & ((sees & (firsts | bit)) == sees)
        firsts |= tl.where(is_first, bit, 0)
        survival = tl.minimum(best * ratio, 1.0)
        handed = tl.where(before > 0.0, survival / tl.where(before > 0.0, before, 1.0), 0.0)
        conditional = tl.where(is_new, handed, conditional)
        before = survival

        is_child = (position[:, None] == at_position + 1) & (rank == 0)[None, :]
        child = tl.sum(tl.sum(tl.where(is_child, chance, 0.0), axis=1), axis=0)
        is_sibling = (position[:, None] == at_position) & (rank == at_rank + 1)[None, :]
        sibling = tl.sum(tl.sum(tl.where(is_sibling, chance, 0.0), axis=1), axis=0)
        value = tl.where(is_chosen, above * sibling, value)
        its_rank = tl.where(is_chosen, at_rank + 1, its_rank)
        comes_in = node == number + 1
        value = tl.where(comes_in, best * child, value)
        reached = tl.where(comes_in, best, reached)
        its_position = tl.where(comes_in, at_position + 1, its_position)

    # If candidates run out: the last token again, after the bonus token, with chance 0.
    is_node = node < N
    at = (request * K + position_of) * C + rank_of
    token = tl.load(candidates + at, mask=is_node & (rank_of >= 0), other=0)
    token = tl.where(rank_of >= 0, token, last)
    of_slot = slot * N + node
    tl.store(tokens + of_slot, token, mask=is_node)
    tl.store(parents + of_slot, parent_of, mask=is_node)
    tl.store(depths + of_slot, position_of + 1, mask=is_node)
    tl.store(masks + of_slot, seen, mask=is_node)
    tl.store(sizes + slot, N)
    tl.store(argmax_nodes + slot, firsts)
    tl.store(drafts + request * W + node, token, mask=is_node)
    tl.store(chances + request * W + node, conditional, mask=is_node)
    if W > N:
        draft = tl.arange(0, PADDED_W)
        is_rest = (draft >= N) & (draft < W)
        tl.store(drafts + request * W + draft, last + tl.zeros_like(draft), mask=is_rest)
        tl.store(chances + request * W + draft, tl.zeros([PADDED_W], tl.float32), mask=is_rest)


def grow(
    trees: TreeSlots,
    slots: DraftSlots,
    batch: Batch,
    chosen: Drafts,
    candidates: Candidates,
    draft_output: tuple[torch.Tensor, torch.Tensor],
    *,
    has_block: bool,
) -> None:
    """Make trees of a batch's drafts, if they may be trees. Captured.

    Args:
        trees: out: the trees of the batch's slots; size 0: the drafts are a chain.
        slots: what produced each slot's drafts, and its ratio.
        batch: R requests.
        chosen: tokens and chances as chains, and the blocks' confidence, [max R, K] each.
        candidates: candidates for the blocks' positions.
        draft_output: out: tokens and chances of W consecutive drafts, [max R, W] each.
        has_block: whether a block was run; without one there are no trees.
    """
    width, num_nodes, max_drafts = slots.width, trees.num_nodes, draft_output[0].shape[1]
    num_candidates = candidates.tokens.shape[-1]
    _grow[(len(batch.slots),)](
        batch.slots,
        batch.num_sampled,
        batch.newest,
        *chosen,
        *candidates,
        slots.records,
        slots.overall,
        trees.may_branch,
        trees.sizes,
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.masks,
        trees.argmax_nodes,
        *draft_output,
        HAS_BLOCK=has_block,
        NUM_RECORD_FIELDS=NUM_RECORD_FIELDS,
        K=width,
        PADDED_K=next_power_of_2(width),
        C=num_candidates,
        PADDED_C=next_power_of_2(num_candidates),
        N=num_nodes,
        PADDED_N=next_power_of_2(num_nodes),
        W=max_drafts,
        PADDED_W=next_power_of_2(max_drafts),
        PRIOR=PRIOR_TOKENS,
        BLOCK=BLOCK,
        num_warps=1,
    )
