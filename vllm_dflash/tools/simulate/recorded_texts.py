"""Texts of a target, and what its drafter would draft at each of their tokens: in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_dflash.model.reference_decoding import block_states
from vllm_dflash.model.reference_tree import successors
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.tools.parity.oracle import Oracle


@dataclass(frozen=True)
class RecordedText:
    """A prompt's greedy continuation, token by token."""

    prompt_length: int
    tokens: list[int]
    """Of the continuation, [T]; the first is the first bonus token."""
    candidates: Ints
    """Behind each of the first T - 1 tokens: of K places, C tokens, [T - 1, K, C]."""
    chances: Floats
    """See `planning.draft_tree.Candidates`, [T - 1, K, P, C]."""


@torch.inference_mode()
def record(
    oracle: Oracle,
    prompts: Sequence[list[int]],
    new_tokens: int,
    tell: Callable[[float], None] = lambda done: None,
) -> list[RecordedText]:
    """Teacher-forced: drafts along the target's own text. `tell` hears how many are done."""
    texts = []
    for number, prompt in enumerate(prompts):
        written = oracle.target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )[0].tolist()
        _, features = oracle.text(written, oracle.drafter.spec.taps)
        places = range(len(prompt), len(written) - 1)
        found = [_candidates(oracle, features[:place], written[place]) for place in places]
        tokens, chances = (torch.stack(each).numpy() for each in zip(*found, strict=True))
        texts.append(RecordedText(len(prompt), written[len(prompt) :], tokens, chances))
        tell(number + 1)
    return texts


def _candidates(
    oracle: Oracle, features: torch.Tensor, bonus: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [K, C] and chances [K, P, C] of one block."""
    drafter = oracle.drafter
    hidden = block_states(oracle.target, drafter, features, bonus, drafter.spec.max_draft_tokens)
    selector = drafter.candidate_selector
    before = [bonus] * (1 if selector is None else selector.top_k)
    tokens, chances = [], []
    for row, state in zip(drafter.logits(hidden, oracle.target), hidden, strict=True):
        behind = [successors(drafter, row, state, token) for token in before]
        tokens.append([token for token, _ in behind[0]])
        chances.append([[chance for _, chance in each] for each in behind])
        before = before if selector is None else tokens[-1]
    return torch.tensor(tokens), torch.tensor(chances, dtype=torch.double)
