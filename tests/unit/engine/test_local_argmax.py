"""`use_local_argmax_reduction`: drafts without whole rows of logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.drafter_harness import DrafterHarness, Row
from support.pairs import Pair, make_pair

OPTION: dict[str, Any] = {"draft_length": "fixed", "use_local_argmax_reduction": True}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """A drafter whose head is vLLM's, like a target's in an engine."""
    return make_pair(tmp_path, own_vocabulary=True, draft_vocab_size=100)


def contexts(pair: Pair) -> list[Row]:
    width = len(pair.spec.taps) * pair.spec.target_hidden_size
    generator = torch.Generator().manual_seed(0)
    return [
        Row(number, torch.randn(length, width, generator=generator), bonus=7 + number)
        for number, length in enumerate((3, 41, 70))
    ]


@pytest.mark.usefixtures("runner")
def test_drafts_are_those_of_whole_rows(pair: Pair) -> None:
    whole, by_rank = DrafterHarness(pair, draft_length="fixed"), DrafterHarness(pair, **OPTION)
    drafts = by_rank.step(contexts(pair))
    assert drafts == whole.step(contexts(pair))
    assert whole.logits is not None
    assert by_rank.logits is None
    assert len({token for tokens in drafts for token in tokens}) > 5


@pytest.mark.usefixtures("runner")
def test_drafts_of_nan_are_tokens_like_others(pair: Pair) -> None:
    """They are verified and not counted. Without the option they are dropped."""
    harness = DrafterHarness(pair, **OPTION)
    rows = contexts(pair)
    rows[1].features[3] = float("nan")
    drafts = harness.step(rows)
    assert [len(tokens) for tokens in drafts] == [pair.spec.max_draft_tokens] * 3
    assert all(0 <= token < pair.spec.vocab_size for tokens in drafts for token in tokens)
    assert harness.proposer.statistics.nan_drafts == 0


@pytest.mark.usefixtures("runner")
def test_a_head_that_is_not_vllms_is_refused(tmp_path: Path) -> None:
    message = (
        "^vLLM cannot search the head of HfTarget rank by rank: remove 'use_local_argmax_reduction'"
    )
    with pytest.raises(ValueError, match=message):
        DrafterHarness(make_pair(tmp_path), **OPTION)
