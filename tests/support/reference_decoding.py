"""Decoding with the reference drafter: draft a block, verify it in one pass, keep what agrees."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from reference.reference_drafter import ReferenceDrafter, target_step


@dataclass
class Generation:
    """Result of `generate`."""

    tokens: list[int]
    """New tokens, the prompt's not included."""
    acceptance_lengths: list[int]
    """Tokens each verify step produced, its bonus token included; drafted steps only."""


@torch.inference_mode()
def block_states(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    features: torch.Tensor,  # [C, m * H]
    bonus: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Return the states [K, H] of a block after C context rows that predict its drafts: those of
    mask rows, or of the bonus token's row and all mask rows but one."""
    first = 0 if drafter.spec.sample_from_anchor else 1
    masks = [drafter.spec.mask_token_id] * (num_draft_tokens - 1 + first)
    block_ids = torch.tensor([[bonus, *masks]], device=features.device)
    positions = torch.arange(len(features) + block_ids.shape[1], device=features.device)
    z = drafter.context(features[None])
    block = drafter.embed(block_ids, target)
    return drafter(block, z, positions[None])[0, first:]


@torch.inference_mode()
def draft(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    features: torch.Tensor,  # [C, m * H]
    bonus: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Return the logits [K, V'] of the same block."""
    return drafter.logits(block_states(target, drafter, features, bonus, num_draft_tokens), target)


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    prompt: list[int],
    max_new_tokens: int,
    *,
    whole_blocks: bool = False,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Decode one prompt greedily with DFlash.

    Like the engine, it never drafts more than the request can still use. With `whole_blocks`, as on
    Model Runner V2, the drafter's block still has all of its rows.
    """
    spec = drafter.spec
    k_max, cache = spec.max_draft_tokens, DynamicCache(config=target.config)
    device = target.device
    logits, features = target_step(target, torch.tensor([prompt], device=device), cache, spec.taps)
    tokens = [int(logits[-1].argmax())]
    acceptance_lengths: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        k = min(k_max, max_new_tokens - len(tokens) - 1)
        drafts = []
        if k > 0:
            rows = k_max if whole_blocks else k
            hidden = block_states(target, drafter, features, tokens[-1], rows)
            block_logits = drafter.logits(hidden, target)
            newest = drafter.context(features[-1])
            drafts = drafter.choose(block_logits, hidden, tokens[-1], newest, target).tolist()[:k]
        produced, new_features = _verify(target, [tokens[-1], *drafts], cache, spec.taps)
        # Only rows of accepted tokens become context; the cache forgets the rejected ones.
        features = torch.cat([features, new_features])
        cache.crop(len(features))
        if k > 0:
            acceptance_lengths.append(len(produced))
        stop = next((i for i, token in enumerate(produced) if token in stop_ids), None)
        tokens += produced if stop is None else produced[: stop + 1]
    return Generation(tokens[:max_new_tokens], acceptance_lengths)


def _verify(
    target: PreTrainedModel, block: list[int], cache: DynamicCache, taps: Collection[int]
) -> tuple[list[int], torch.Tensor]:
    """Return what the target writes after a bonus token: accepted drafts and one token more.

    This is one pass over the bonus token and the drafts.

    Returns:
        The tokens, and the features of the bonus token and all but the last of them.
    """
    step = torch.tensor([block], device=target.device)
    logits, features = target_step(target, step, cache, taps)
    choices, drafts = logits.argmax(-1).tolist(), block[1:]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
        accepted += 1
    return choices[: accepted + 1], features[: accepted + 1]
