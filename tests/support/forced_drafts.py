"""Drafts that come true as far as a test wants, whatever the drafter thinks; on either runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm import LLM

from support.engines import proposer_of


@contextmanager
def forced_drafts(
    llm: LLM, texts: Sequence[Sequence[int]], how_many: Callable[[int], int]
) -> Iterator[None]:
    """Draft what these texts, prompts included, go on with.

    `how_many` drafts behind a bonus token at a position come true, and those after them do not.
    """
    model = proposer_of(llm).model
    forward, target_ids = model.forward, model.target_ids
    mask = proposer_of(llm).spec.mask_token_id
    rows: list[tuple[int, int, int]] = []  # of each mask: its bonus token, where that is, how far

    def run(input_ids: torch.Tensor, positions: torch.Tensor, **more: Any) -> torch.Tensor:
        rows.clear()
        bonus, place = 0, 0
        for token, position in zip(input_ids.tolist(), positions.tolist(), strict=True):
            if token == mask:
                rows.append((bonus, place, position - place))
            else:
                bonus, place = token, position
        return forward(input_ids, positions, **more)

    def drafts(tokens: torch.Tensor) -> torch.Tensor:
        found = target_ids(tokens).clone()
        for number, (bonus, place, ahead) in enumerate(rows[: len(found)]):
            for text in texts:
                if place + ahead < len(text) and text[place] == bonus:
                    found[number] = (text[place + ahead] + (ahead > how_many(place))) % mask
        return found

    model.forward, model.target_ids = run, drafts
    try:
        yield
    finally:
        del model.forward, model.target_ids
