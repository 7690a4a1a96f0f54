"""Decoding with draft trees, by the reference drafter and plain Python."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from reference.reference_drafter import ReferenceDrafter, target_step
from support.reference_decoding import draft
from support.trees_by_hand import Tree, chances_of, grown
from vllm_dflash.engine.v2.trees.tree_growth import MOST_CANDIDATES


@torch.inference_mode()
def tree_of(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    features: torch.Tensor,  # [C, m * H]
    bonus: int,
    num_nodes: int,
) -> Tree:
    """Return the tree of a block after C context rows, as made by an engine without learning."""
    width = drafter.spec.max_draft_tokens
    logits = draft(target, drafter, features, bonus, width)
    chances, tokens = logits.softmax(-1).topk(MOST_CANDIDATES)
    return grown(tokens.tolist(), chances_of(chances.tolist()), num_nodes, bonus)


@torch.inference_mode()
def acceptance_lengths(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    prompt: list[int],
    written: list[int],
    num_nodes: int,
) -> list[int]:
    """Return the tokens of each step that verifies a tree, bonus token included, along what the
    target writes greedily after a prompt."""
    cache = DynamicCache(config=target.config)
    whole = torch.tensor([prompt + written])
    _, features = target_step(target, whole, cache, drafter.spec.taps)
    lengths, done = [], 1
    while done < len(written):
        context = features[: len(prompt) + done - 1]
        tree = tree_of(target, drafter, context, written[done - 1], num_nodes)
        node, accepted = -1, 0
        while done + accepted < len(written):
            here = zip(tree.parents, tree.tokens, strict=True)
            wanted = node, written[done + accepted]
            found = [number for number, one in enumerate(here) if one == wanted]
            if not found:
                break
            node, accepted = found[0], accepted + 1
        lengths.append(1 + accepted)
        done += lengths[-1]
    return lengths
