"""Requests that end just before, at and beyond the target's or the drafter's context limit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from support.engines import (
    DRAFTER,
    FIXED,
    USES_V2,
    acceptance_by_request,
    engine,
    greedy,
    held_out_prompts,
    slow_on_v2,
)

pytestmark = pytest.mark.usefixtures("runner")
LIMIT = 128
LENGTHS = [60, 100, 117, 118, 119, 120, 121, 122, 125, 126, 127]
ALONE = [2, 5, 10]
if USES_V2:  # in Triton's interpreter
    LENGTHS, ALONE = [93, 94, 121, 125, 126, 127], [2, 5]
CASES = [
    pytest.param("asked for", "synchronous", marks=slow_on_v2),
    pytest.param("its own", "synchronous", marks=pytest.mark.slow),
    ("asked for", "asynchronous"),
]
LONG = " ".join(held_out_prompts(3))


def prompts(llm: LLM) -> list[dict[str, list[int]]]:
    tokens = llm.get_tokenizer().encode(LONG)
    return [{"prompt_token_ids": tokens[:length]} for length in LENGTHS]


def generate(llm: LLM, max_tokens: list[int]) -> list[tuple[list[int], str | None]]:
    """Generate for all prompts at once, then for some alone."""
    asked = prompts(llm)
    params = [greedy(count, ignore_eos=True) for count in max_tokens]
    outputs = llm.generate(asked, params, use_tqdm=False)
    for number in ALONE:
        outputs += llm.generate([asked[number]], params[number], use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]


UP_TO = {
    "one before the limit": [LIMIT - 1 - length for length in LENGTHS[:-1]] + [1],
    "at the limit": [LIMIT - length for length in LENGTHS],
    "beyond the limit": [10_000] * len(LENGTHS),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[list[int], str | None]]]:
    with engine(max_model_len=LIMIT, max_num_seqs=4) as llm:
        return {name: generate(llm, counts) for name, counts in UP_TO.items()}


@pytest.mark.parametrize(("kind", "scheduling"), CASES if USES_V2 else CASES[:2])
def test_requests_that_end_at_the_limit(
    expected: dict[str, list[tuple[list[int], str | None]]],
    tmp_path: Path,
    kind: str,
    scheduling: str,
) -> None:
    """A limit of 96 against the target's 128, set by the user or by the drafter. Positions go on
    past it."""
    drafter = tmp_path / "drafter"
    shutil.copytree(DRAFTER, drafter)
    config = json.loads((drafter / "config.json").read_text())
    speculative: dict[str, Any] = {**FIXED, "model": str(drafter)}
    limit = LIMIT
    if kind == "asked for":
        speculative["max_model_len"] = limit = 96
    else:
        config["max_position_embeddings"] = 96
    (drafter / "config.json").write_text(json.dumps(config))
    with engine(
        scheduling,
        max_model_len=LIMIT,
        max_num_seqs=4,
        speculative_config=speculative,
        enable_prefix_caching=False,
    ) as llm:
        verified = acceptance_by_request(llm)
        found = {name: generate(llm, counts) for name, counts in UP_TO.items()}
        (stats,) = llm.collective_rpc("dflash_stats")
    assert found == expected
    assert stats["nan_drafts"] == 0
    # Requests in order of their ids. In a batch, those far from both limits were drafted.
    by_number = {int(name.split("-")[0]): lengths for name, lengths in verified.items()}
    last_batch = 2 * (len(LENGTHS) + len(ALONE))
    drafted = [LENGTHS[i] for i in range(len(LENGTHS)) if last_batch + i in by_number]
    # A draft must leave room for itself, the bonus token before it and the token after it.
    assert drafted == [length for length in LENGTHS if length <= limit - 3]
