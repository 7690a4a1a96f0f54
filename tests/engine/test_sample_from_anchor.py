"""Drafters whose rows each predict the token after their own, the bonus token's row too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support import DEMO
from support.engines import (
    DFLASH,
    USES_V2,
    as_the_reference,
    engine,
    fix_costs,
    greedy,
    held_out_prompts,
    proposer_of,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("runner")
NEW_TOKENS, PROMPTS = (16, held_out_prompts(4)) if USES_V2 else (48, held_out_prompts(12))


def declared(folder: Path, name: str) -> Path:
    """Return a copy of a demo drafter that declares it; it was not trained so."""
    shutil.copytree(DEMO / name, folder / name)
    file = folder / name / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"]["sample_from_anchor"] = True
    file.write_text(json.dumps(config))
    return folder / name


def test_texts_and_acceptance_are_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests at once and in chunks: blocks of 8 rows have 8 drafts."""
    drafter = declared(tmp_path, "drafter")
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 96}
    texts, stats = as_the_reference(drafter, PROMPTS, NEW_TOKENS, **settings)
    assert stats["draft_tokens"] > 7 * stats["verifications"] > 0
    fix_costs(monkeypatch)
    speculative = {**DFLASH, "model": str(drafter)}
    with engine(speculative_config=speculative, **settings) as llm:
        assert proposer_of(llm).options.block_rows == proposer_of(llm).options.draft_width == 8
        assert token_ids(llm, PROMPTS, greedy(NEW_TOKENS)) == texts
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["drafted_steps"] > 0
