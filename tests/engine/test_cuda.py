"""Tests that need a GPU: captured graphs, asynchronous scheduling, CUDA's attention backends.

Run `pytest tests/engine/test_cuda.py` with the `cuda` extra installed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM

from support.cuda_engines import (
    BATCHES,
    DTYPE,
    GRAPHS,
    IS_EMULATED,
    NEW_TOKENS,
    NO_FLASH_ATTENTION,
    NO_FLASHINFER,
    ON_CUDA,
    PROMPTS,
    SHARED,
    SLOW_EMULATED,
)
from support.engines import (
    DFLASH,
    FIXED,
    engine,
    fix_costs,
    greedy,
    proposer_of,
    runner_of,
    token_ids,
)
from support.pairs import make_pair

pytestmark = [*ON_CUDA, *SLOW_EMULATED]
REPEATING = [prompt + prompt for prompt in PROMPTS[:8]]
OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": FIXED,
    "planned": DFLASH,
    "adaptive verification": {**DFLASH, "enable_adaptive_verification": True},
}


@pytest.fixture(autouse=True)
def _no_costs_of_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the costs: with an emulated GPU's own, the planner would rightly draft nothing."""
    if IS_EMULATED:
        fix_costs(monkeypatch)


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], list[list[int]]]:
    """Texts behind both kinds of prompts."""
    with engine(**GRAPHS) as llm:
        behind, repeated = (
            token_ids(llm, some, greedy(NEW_TOKENS)) for some in (PROMPTS, REPEATING)
        )
        return behind, repeated


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Graphs that are replayed from here on, one entry for each replay."""
    found: list[object] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: found.append(graph) or replay(graph)
    )
    return found


@pytest.fixture(scope="module")
def captured() -> dict[str, dict[str, set[object]]]:
    """Graphs of the engines started so far, by their options."""
    return {}


def graphs_of(llm: LLM) -> dict[str, set[object]]:
    """Return the captured batches of the target and of the drafter."""
    managers = {
        "target": runner_of(llm).cudagraph_manager,
        "drafter": proposer_of(llm).query_cudagraph_manager,
    }
    return {name: set(manager.graphs) for name, manager in managers.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("is_async", [True, False], ids=["asynchronous", "synchronous"])
def test_hazard_10_output_is_identical_and_nothing_is_captured_after_warm_up(
    plain: tuple[list[list[int]], list[list[int]]],
    replays: list[object],
    captured: dict[str, dict[str, set[object]]],
    name: str,
    is_async: bool,
) -> None:
    """Graphs are replayed at every batch size. Whatever the lengths, nothing is captured, no buffer
    moves, and the second round takes no memory from the device. Both ways of scheduling have the
    same graphs. Texts that repeat give free drafts: no setting has to ask for it."""
    behind, repeated = plain
    with engine(speculative_config=dict(OPTIONS[name]), async_scheduling=is_async, **GRAPHS) as llm:
        allocations = []
        for _ in range(2):
            for batch in BATCHES:
                replays.clear()
                assert token_ids(llm, PROMPTS[:batch], greedy(NEW_TOKENS)) == behind[:batch]
                # Most steps only decode: a step of 8 tokens a request writes at most 8 of them.
                assert len(replays) >= NEW_TOKENS // 8
            allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        kinds = len(set(map(id, replays)))
        for batch in (1, 8):
            found = token_ids(llm, REPEATING[:batch], greedy(NEW_TOKENS))
            assert found == repeated[:batch]
        (stats,) = llm.collective_rpc("dflash_stats")
        graphs = graphs_of(llm)
        looks_up = proposer_of(llm).free_drafts is not None
    assert allocations[1] == allocations[0]
    assert kinds > 1  # the target's and the drafter's, of several sizes
    assert stats["runner"] == "v2"
    assert stats["captures_after_warmup"] == 0
    assert stats["reallocations_after_warmup"] == 0
    assert stats["accepted_tokens"] > 0
    assert all(graphs.values())
    assert graphs == captured.setdefault(name, graphs)
    assert looks_up == (name != "fixed")
    assert stats["draft_tokens"] >= stats["free_draft_tokens"] >= stats["free_accepted_tokens"]
    assert (stats["free_accepted_tokens"] > 0) == looks_up


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("FLASH_ATTN", marks=NO_FLASH_ATTENTION),
        "TRITON_ATTN",
        pytest.param("FLASHINFER", marks=NO_FLASHINFER),
    ],
)
def test_mixed_windows_on_each_attention_backend(tmp_path: Path, backend: str) -> None:
    """Windows, causality and a context several times the window, in the drafter's dtype."""
    pair = make_pair(
        tmp_path,
        head_dim=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=32,
    )
    prompts = [{"prompt_token_ids": [(7 * r + 3 * i) % 300 for i in range(120)]} for r in range(4)]
    settings = {"model": str(pair.target), "skip_tokenizer_init": True, "max_model_len": 256}
    settings |= {"dtype": DTYPE, "block_size": 16, **SHARED}
    speculative = {**FIXED, "model": str(pair.drafter), "attention_backend": backend}
    params = greedy(32, detokenize=False, ignore_eos=True)
    with engine(**settings, speculative_config=speculative) as llm:
        token_ids(llm, prompts, params)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["nan_drafts"] == 0
    assert stats["draft_tokens"] > 0
