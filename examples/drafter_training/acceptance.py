"""Measure a drafter's tokens a step on text that the target wrote, without an engine."""

import torch

from drafter_training.blocks import cut_blocks
from drafter_training.losses import block_loss
from drafter_training.sources import Cached
from reference.reference_drafter import ReferenceDrafter


@torch.no_grad()
def measure(
    drafter: ReferenceDrafter,
    source: Cached,
    embed: torch.nn.Module,
    head: torch.Tensor,
    tokens: int,
) -> tuple[float, list[float]]:
    """Walk greedily through the first `tokens` tokens of each text, with a block of B rows a step.

    Returns:
        Tokens a step, including the target's own, and how often each of the w = B - 1 drafts was
        accepted.
    """
    size = drafter.spec.block_size
    accepted = torch.zeros(size - 1)
    steps, walked = 0, 0
    for pair, features in source.rows:
        first, last = len(pair[0]), len(pair[0]) + min(len(pair[1]), tokens) - 1
        anchors = [*range(first, last)]
        if not anchors:
            continue
        blocks = cut_blocks([pair], [anchors], size, drafter.spec.mask_token_id).on(head.device)
        rows = features[None].to(head.device, torch.float32)
        _, hits = block_loss(drafter, blocks, rows, embed, head, torch.float32)
        lengths = hits.long().cumprod(-1).sum(-1).tolist()
        at = first
        while at < last:
            length = lengths[at - first]
            accepted[:length] += 1
            steps += 1
            walked += min(length + 1, last - at)
            at += length + 1
    return walked / steps, (accepted / steps).tolist()
