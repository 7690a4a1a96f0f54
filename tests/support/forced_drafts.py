"""Drafts that are right as far as a test wants, whatever the drafter thinks, on either runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm import LLM

from support.engines import proposer_of
from vllm_dflash.model.draft_model import DFlashDraftModel


@contextmanager
def forced_drafts(
    llm: LLM, texts: Sequence[Sequence[int]], how_many: Callable[[int], int]
) -> Iterator[None]:
    """Draft the continuations of these texts, which include their prompts.

    `how_many` drafts after a bonus token at a position are right, and those after them are wrong.
    """
    model = proposer_of(llm).model
    forward, target_ids = model.forward, model.target_ids
    mask = proposer_of(llm).spec.mask_token_id
    rows: list[tuple[int, int, int]] = []  # of each mask: its bonus token, its position, how far

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
                    right = text[place + ahead]
                    found[number] = (right + 1) % mask if ahead > how_many(place) else right
        return found

    model.forward, model.target_ids = run, drafts
    try:
        yield
    finally:
        del model.forward, model.target_ids


@contextmanager
def forced_in_graphs(
    texts: Sequence[Sequence[int]], how_many: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Do the same on the device, for engines that start inside and whose blocks are captured.

    A text is identified by its bonus token at its place. `how_many` takes places [R, 1].
    """
    forward, target_ids = DFlashDraftModel.forward, DFlashDraftModel.target_ids
    longest = max(map(len, texts))
    on_host = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])  # [T, L]
    tables: list[torch.Tensor] = []  # made by a warm-up, not within a capture

    def run(self: Any, input_ids: torch.Tensor, positions: torch.Tensor, **more: Any) -> Any:
        self.rows = input_ids, positions
        if not tables:
            tables.append(on_host.to(input_ids.device))
        return forward(self, input_ids, positions, **more)

    def drafts(self: Any, ids: torch.Tensor) -> torch.Tensor:
        found = target_ids(self, ids).view(-1, self.uniform_width - 1)  # [R, K]
        count, (table,) = found.numel() + len(found), tables
        tokens, places = (row[:count].view(len(found), -1) for row in self.rows)  # [R, 1 + K]
        places = places.clamp(max=longest - 1).long()
        is_text = table[:, places[:, 0]] == tokens[:, 0]  # [T, R]
        wanted = table[is_text.long().argmax(0)[:, None], places[:, 1:]]  # [R, K]
        ahead = places[:, 1:] - places[:, :1]
        wanted = torch.where(ahead > how_many(places[:, :1]), wanted + 1, wanted)
        return torch.where(is_text.any(0)[:, None], wanted, found).flatten()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashDraftModel, "forward", run)
        patch.setattr(DFlashDraftModel, "target_ids", drafts)
        yield
