"""The demo target with drafters that walk along candidates: plain vLLM's text, the reference's
drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import DEMO
from support.engines import (
    USES_V2,
    as_the_reference,
    engine,
    greedy,
    held_out_prompts,
    slow_on_v2,
    token_ids,
)

pytestmark = pytest.mark.usefixtures("runner")
DRAFTER2, LILICORR = DEMO / "drafter2", DEMO / "lilicorr"
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
NEW_TOKENS, PROMPTS = (24, held_out_prompts(4)) if USES_V2 else (48, held_out_prompts(16))


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine(**SETTINGS) as llm:
        return token_ids(llm, PROMPTS, greedy(NEW_TOKENS))


@pytest.mark.parametrize(
    ("drafter", "least"),
    [
        pytest.param(DRAFTER2, 1.8 if USES_V2 else 2.2, id="dflash2"),
        pytest.param(LILICORR, 1.7 if USES_V2 else 2.2, id="lilicorr", marks=slow_on_v2),
    ],
)
def test_acceptance_of_every_step_equals_the_reference(
    plain: list[list[int]], drafter: Path, least: float
) -> None:
    """The text is plain vLLM's, too."""
    tokens, stats = as_the_reference(drafter, PROMPTS, NEW_TOKENS, **SETTINGS)
    assert tokens == plain
    assert stats["nan_drafts"] == 0
    assert stats["mean_acceptance_length"] > least
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
