"""An engine's recording without an engine: what a drafter in plain PyTorch computes."""

from __future__ import annotations

import torch

from parity.compare_recordings import count_matches
from parity.oracle import Oracle
from parity.recorder import DraftStep, Recording
from support.pairs import Pair


def write(oracle: Oracle, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the prompt and its greedy continuation."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits, _ = oracle.text(ids, [0])
        ids.append(int(logits[-1].argmax()))
    return ids


@torch.inference_mode()
def simulate(oracle: Oracle, ids: list[int], prompt_length: int) -> Recording:
    """Draft along a text like an engine that computes what this oracle computes."""
    drafter, target = oracle.drafter, oracle.target
    spec = drafter.spec
    _, features = oracle.text(ids, spec.taps)
    z = drafter.context(features)
    steps: list[DraftStep] = []
    length = prompt_length
    while (k := min(spec.max_draft_tokens, len(ids) - length - 2)) > 0:
        block = torch.tensor([ids[length], *[spec.mask_token_id] * k])
        embedding = drafter.embed(block, target)
        layers, hidden = oracle.block(embedding, z[:length])
        logits = drafter.logits(hidden[1:], target)
        drafts = drafter.target_ids(logits.argmax(-1))
        accepted = count_matches(drafts, ids[length + 1 : length + 1 + k])
        positions = torch.arange(length, length + k + 1)
        steps.append(
            DraftStep(
                length, block, positions, embedding, layers, hidden, logits, drafts, k, accepted
            )
        )
        length += 1 + accepted
    return Recording(ids, prompt_length, features, z, torch.arange(len(ids)), steps, "v1")


def oracle_of(pair: Pair) -> Oracle:
    return Oracle(pair.load_target(), pair.load_drafter())
