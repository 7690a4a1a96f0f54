"""Engines on the emulated GPU as users start them: piecewise graphs, other GPUs, many
requests, 8-bit caches, targets with linear attention, sleep, drafters with their own tensors, named
tokens, measured costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from emulated import races, torch_cuda, vllm_side
from support.emulated_runs import on_cpu, run, watched
from support.engines import (
    DFLASH,
    FIXED,
    engine,
    greedy,
    proposer_of,
    runner_of,
    scheduler_of,
    token_ids,
    with_fixed_costs,
)
from support.forced_drafts import forced_in_graphs
from support.hybrids import kernels_for_prompts, know_qwen35
from support.pairs import drafter_config, make_pair, save_drafter
from support.schedules import (
    GRAPHS,
    NEW_TOKENS,
    ON_GPU,
    PROMPTS,
    SCENARIOS,
    SIZES,
    outcome_of,
    tokens_of,
)
from support.targets import continued, make_target

pytestmark = pytest.mark.emulated
PIECEWISE: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 3,
        "backend": "eager",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": GRAPHS["compilation_config"]["cudagraph_capture_sizes"],
    },
}
"""vLLM's default, except for Inductor."""


def test_piecewise_graphs_step_and_count_as_on_the_cpu_platform() -> None:
    """Both models are traced without a break; prompts run in graphs between attention layers."""
    replayed: list[str] = []
    replay = torch.cuda.CUDAGraph.replay

    def note(graph: Any) -> None:
        replayed.append(graph.names())
        replay(graph)

    with pytest.MonkeyPatch.context() as patch, vllm_side.with_dynamo():
        patch.setattr(torch.cuda.CUDAGraph, "replay", note)
        found = run("fixed", "random 1", has_graphs=True, **PIECEWISE)
    assert found == on_cpu("asynchronous: fixed")
    has_attention = ["attention" in str(names) for names in replayed]
    assert any(has_attention)
    assert not all(has_attention)


def test_an_engine_for_one_request_has_a_graph_of_each_length() -> None:
    """vLLM chooses the sizes. It has a table of lengths by batch size, cut off at the largest."""
    sizes = dict(GRAPHS["compilation_config"])
    del sizes["cudagraph_capture_sizes"]
    one = {**SCENARIOS["planned"].settings, **ON_GPU, **GRAPHS, "compilation_config": sizes}
    one |= {"max_num_seqs": 1}
    with with_fixed_costs(), engine(async_scheduling=True, **one) as llm:
        graphs = runner_of(llm).cudagraph_manager.graphs
        assert sorted((graph.num_reqs, graph.num_tokens) for graph in graphs) == [
            (1, rows) for rows in (1, 2, 4, 8)
        ]
        found = tokens_of(outcome_of(llm, SCENARIOS["planned"]))
    assert found == tokens_of(on_cpu("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=["A100", "B200"])
def test_other_gpus_step_and_count_as_on_the_cpu_platform(capability: tuple[int, int]) -> None:
    with vllm_side.another_gpu(*capability):
        found = run("fixed", "latest", has_graphs=True)
    assert found == on_cpu("asynchronous: fixed")


@pytest.mark.slow
def test_256_requests_and_2048_tokens() -> None:
    """Some of vLLM's own capture sizes; costs are measured, as for users."""
    sizes = [1, 2, 8, 32, 128, 256, 512]
    many = {**SCENARIOS["planned"].settings, **ON_GPU, "kv_cache_memory_bytes": 256 << 20}
    many |= {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "enforce_eager": False}
    many["compilation_config"] = {**GRAPHS["compilation_config"], "cudagraph_capture_sizes": sizes}
    with engine(async_scheduling=True, **many) as llm:
        assert max(graph.num_tokens for graph in runner_of(llm).cudagraph_manager.graphs) == 512
        prompts = [text[:30] for text in PROMPTS for _ in range(24)]
        found = token_ids(llm, prompts, greedy(4, ignore_eos=True))
        (stats,) = llm.collective_rpc("dflash_stats")
    with engine(**SIZES, **ON_GPU) as llm:
        expected = token_ids(llm, prompts[::24], greedy(4, ignore_eos=True))
    assert found == [tokens for tokens in expected for _ in range(24)]
    assert stats["nan_drafts"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["latest", "random 1"])
def test_a_cache_in_8_bits_changes_no_text(schedule: str) -> None:
    """The text is the target's own with such a cache: Triton's own kernel computes attention."""
    plain = tokens_of(run("plain", schedule, has_graphs=True, kv_cache_dtype="fp8"))
    found = run("planned", schedule, has_graphs=True, kv_cache_dtype="fp8")
    assert tokens_of(found) == plain
    assert found["counters"]["accepted_tokens"] > 0
    assert found["counters"]["nan_drafts"] == 0


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Any]]:
    """A pair whose target has linear attention and whose drafter has a window on one layer."""
    know_qwen35()
    with kernels_for_prompts():
        target = make_target(tmp_path / "target", "qwen3.5")
        windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
        shape = {"head_dim": 64, "num_key_value_heads": 1}
        save_drafter(tmp_path / "drafter", drafter_config(**windows, **shape))
        yield tmp_path, target


def test_targets_with_linear_attention(hybrid: tuple[Path, Any]) -> None:
    """Graphs cover few lengths; rejected drafts leave no state behind."""
    folder, target = hybrid
    prompts = [[(7 * row + 3 * i) % 300 for i in range(n)] for row, n in enumerate((9, 50, 70))]
    texts = [continued(target, prompt, NEW_TOKENS) for prompt in prompts]
    settings = {**SIZES, **ON_GPU, **GRAPHS, "model": str(folder / "target")}
    settings["speculative_config"] = {**DFLASH, "model": str(folder / "drafter")}
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = greedy(NEW_TOKENS, ignore_eos=True, detokenize=False)
    with (
        races.found() as missing,
        with_fixed_costs(),
        forced_in_graphs(texts, lambda places: places % 8),
        engine(async_scheduling=True, skip_tokenizer_init=True, **settings) as llm,
    ):
        races.forget()
        found = token_ids(llm, requests, params)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert missing == {}
    assert found == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert stats["accepted_tokens"] > NEW_TOKENS


@pytest.mark.slow
def test_an_engine_that_slept_goes_on() -> None:
    """Level 1: weights come back to where graphs find them, and the cache is empty."""
    settings = {**SCENARIOS["planned"].settings, **ON_GPU, **GRAPHS, "enable_sleep_mode": True}
    with with_fixed_costs(), engine(async_scheduling=True, **settings) as llm:
        before = outcome_of(llm, SCENARIOS["planned"])
        (accepted,) = (stats["accepted_tokens"] for stats in llm.collective_rpc("dflash_stats"))
        llm.sleep(level=1)
        llm.wake_up()
        assert tokens_of(outcome_of(llm, SCENARIOS["planned"])) == tokens_of(before)
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["accepted_tokens"] >= 2 * accepted - 2  # lengths follow what was learned
    assert stats["nan_drafts"] == 0


def test_an_embedding_of_the_mask_and_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    """All of a drafter's own tensors must be on the device."""
    prompts = [{"prompt_token_ids": [(7 * r + 3 * i) % 300 for i in range(20)]} for r in range(2)]
    pair = make_pair(tmp_path, own_vocabulary=True, mask_embedding=True)
    settings: dict[str, Any] = {"model": str(pair.target), "skip_tokenizer_init": True}
    settings |= {"speculative_config": {**FIXED, "model": str(pair.drafter)}}
    with watched("latest", has_graphs=False, **settings) as llm:
        assert proposer_of(llm).model.vocabulary.mask_embedding is not None
        token_ids(llm, prompts, greedy(8, detokenize=False, ignore_eos=True))
        (stats,) = llm.collective_rpc("dflash_stats")
    assert stats["draft_tokens"] > 0
    assert stats["nan_drafts"] == 0


def scores(llm: LLM) -> list[list[dict[int, float]]]:
    """Return the log-probabilities at each place of each prompt's text, of named tokens."""
    params = [
        greedy(NEW_TOKENS, ignore_eos=True, logprob_token_ids=[65, 101, 7][: 1 + number])
        for number in range(len(PROMPTS))
    ]
    texts = [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [
        [{token: one.logprob for token, one in place.items()} for place in text] for text in texts
    ]


def test_tokens_that_requests_name_are_scored_beside_adaptive_verification() -> None:
    """Only the device knows which rows belong to which request; the host does not wait for that."""
    with engine(**SIZES, **ON_GPU) as llm:
        plain = scores(llm)
    adaptive = {**DFLASH, "enable_adaptive_verification": True}
    with watched("others ahead", has_graphs=True, speculative_config=adaptive) as llm:
        found = scores(llm)
    for of_prompt, of_plain in zip(found, plain, strict=True):
        for place, expected in zip(of_prompt, of_plain, strict=True):
            assert place == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take step times from the emulated device."""
    for module in ("profile", "step_clock"):
        monkeypatch.setattr(f"vllm_dflash.engine.{module}.time", torch_cuda.DeviceTime)


@pytest.mark.slow
def test_lengths_are_planned_by_what_steps_take(device_time: None) -> None:
    """Times come from the device's clock. A block costs time, but less than the target, which has
    three times as many layers."""
    settings = {**SCENARIOS["planned"].settings, **ON_GPU, **GRAPHS}
    with engine(async_scheduling=True, **settings) as llm:
        costs = scheduler_of(llm).planner.costs
        curves = costs.draft, costs.verify
        draft, verify = (float(curve.at(np.array([8]))[0]) for curve in curves)
        assert 0.0 < draft < verify
        found = outcome_of(llm, SCENARIOS["planned"])
    assert tokens_of(found) == tokens_of(on_cpu("plain"))
    assert found["counters"]["draft_tokens"] > 0
