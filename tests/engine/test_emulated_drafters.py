"""Drafters with their own tensors on an emulated GPU: all of these must be there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.emulated_runs import watched
from support.engines import FIXED, greedy, proposer_of, token_ids
from support.pairs import make_pair

pytestmark = pytest.mark.emulated
PROMPTS = [{"prompt_token_ids": [(7 * r + 3 * i) % 300 for i in range(20)]} for r in range(2)]


def test_an_embedding_of_the_mask_and_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, own_vocabulary=True, mask_embedding=True)
    settings: dict[str, Any] = {"model": str(pair.target), "skip_tokenizer_init": True}
    settings |= {"speculative_config": {**FIXED, "model": str(pair.drafter)}}
    with watched("latest", has_graphs=False, **settings) as llm:
        assert proposer_of(llm).model.vocabulary.mask_embedding is not None
        token_ids(llm, PROMPTS, greedy(8, detokenize=False, ignore_eos=True))
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["draft_tokens"] > 0
    assert stats["nan_drafts"] == 0
