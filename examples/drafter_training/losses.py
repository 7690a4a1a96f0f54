"""Compute the loss of a drafter's blocks by position, and which drafts are right."""

import torch
import torch.nn.functional as F
from torch import nn

from drafter_training.blocks import Blocks
from reference.reference_drafter import ReferenceDrafter

# The paper weighs the k-th drafted token by exp(-(k - 1) / gamma): an early miss costs most.
GAMMA = 4.0
UNARY_SHARE = 0.5


def block_loss(
    drafter: ReferenceDrafter,
    blocks: Blocks,
    features: torch.Tensor,  # [R, T, m * H]
    embed: nn.Module,
    head: torch.Tensor,  # [V', H]
    dtype: torch.dtype,
    columns: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft all blocks at once, in this dtype.

    `embed` is the target's embedding. `head` has the rows of the tokens that can be drafted. With
    `columns`, ascending, only those columns of the logits are computed.

    Returns:
        The loss, and which drafts are right, [N, w], for all N blocks and w = B - 1 drafted rows.
    """
    weights = torch.exp(-torch.arange(blocks.size - 1, device=head.device) / GAMMA)  # [w]

    def drafted(rows: torch.Tensor) -> torch.Tensor:
        """Drop the blocks' anchors from rows [R, A * B, ...] and sort by block: [N, w, ...]."""
        return rows.unflatten(1, (-1, blocks.size))[:, :, 1:].flatten(0, 1)

    labels = drafted(draft_ids(drafter, blocks.labels))
    if columns is not None:
        head, labels = head[columns], numbered(labels, columns)
    with torch.autocast(head.device.type, dtype, enabled=dtype != torch.float32):
        context = drafter.context(features)  # [R, T, H]
        positions, visible = blocks.with_context(), blocks.visible()
        states = drafter(embed(blocks.tokens), context, positions, visible, blocks.size)
        states = drafted(states)
        logits = F.linear(states, head)  # [N, w, V']
        chosen = logits
        if (selector := drafter.candidate_selector) is not None:
            # Score each token given the right one before it: all tokens, not only candidates.
            codes = selector.predecessor_codebook[drafted(blocks.before())]
            codes = codes * selector.hidden_projection(states)
            chosen = logits + F.linear(codes, selector.successor_codebook)
        if (lattice := drafter.lilicorr) is not None:
            candidates, log_probs = lattice.candidates(logits)
            newest = blocks.positions[:, :: blocks.size, None] - 1  # before a block's first token
            newest = context.gather(1, newest.expand(-1, -1, context.shape[-1])).flatten(0, 1)
            scores = lattice.scores(embed(candidates), log_probs, states, newest)
    if lattice is not None:
        second, hits = lattice_loss(scores, candidates, labels, weights)
        return (1 - UNARY_SHARE) * mean_loss(logits, labels, weights) + UNARY_SHARE * second, hits
    loss, hits = mean_loss(chosen, labels, weights), chosen.argmax(-1) == labels
    if selector is not None:  # the logits, which give the candidates, count as well
        loss = (1 - UNARY_SHARE) * loss + UNARY_SHARE * mean_loss(logits, labels, weights)
    return loss, hits


def draft_ids(drafter: ReferenceDrafter, labels: torch.Tensor) -> torch.Tensor:
    """Convert target tokens to the drafter's ids; -100 for tokens that it cannot draft."""
    if drafter.d2t is None:
        return labels
    return numbered(
        labels, drafter.target_ids(torch.arange(len(drafter.d2t), device=labels.device))
    )


def numbered(labels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the place of each label among ids, which ascend; -100 if it is not there."""
    found = torch.searchsorted(ids, labels.contiguous()).clamp(max=len(ids) - 1)
    return found.masked_fill(ids[found] != labels, -100)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Mean loss of logits [N, w, V] and labels [N, w], with a weight for each position, [w]."""
    weight = weights * (labels != -100)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (loss.view_as(labels) * weight).sum() / weight.sum()


def lattice_loss(
    scores: torch.Tensor, candidates: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of LiLiCorr's scores of each token given the right one before it.

    Scores are [N, w, C before, C]; candidates [N, w, C]; labels [N, w]; weights, by position, [w].
    A position counts if it and all before it in the block have the right token as a candidate.

    Returns:
        The loss, and which tokens would have been chosen correctly, [N, w].
    """
    is_right = candidates == labels[..., None]
    right = is_right.int().argmax(-1)
    before = F.pad(right[:, :-1], (1, 0))  # in the first position, all rows are alike
    given = scores.gather(2, before[..., None, None].expand(-1, -1, 1, scores.shape[-1]))[:, :, 0]
    inside = is_right.any(-1).int().cumprod(-1)
    loss = F.cross_entropy(given.flatten(0, 1), right.flatten(), reduction="none").view_as(inside)
    weight = inside * weights
    return (loss * weight).sum() / weight.sum().clamp(min=1), (given.argmax(-1) == right) * inside
