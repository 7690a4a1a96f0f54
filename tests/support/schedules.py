"""Engines on the emulated GPU under several schedules, to compare with the CPU platform.

Everything that repeats is compared: tokens step by step, and counters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM

from emulated import torch_cuda
from emulated.torch_cuda import Schedule
from support import DEMO
from support.engines import (
    DFLASH,
    FIXED,
    greedy,
    held_out_prompts,
    runner_of,
)
from support.stepped_requests import joined, tokens_by_step

NEW_TOKENS = 12
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "enable_prefix_caching": False,
}
ON_GPU: dict[str, Any] = {"kv_cache_memory_bytes": 32 << 20, "gpu_memory_utilization": 0.5}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,  # Inductor would write kernels for a GPU
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
    },
}
PROMPTS = [text[:40] for text in held_out_prompts(3)]
REPEATING = [3 * text[:12] for text in held_out_prompts(3)]
ANCHORED = {"drafter_overrides": {"dflash_config": {"sample_from_anchor": True}}}


@dataclass(frozen=True)
class Scenario:
    """An engine and its prompts."""

    speculative: dict[str, Any] | None
    prompts: list[str] = field(default_factory=lambda: PROMPTS)
    has_trees: bool = False
    """Whether the target attends to trees: on the CPU platform only in the interpreter."""

    @property
    def settings(self) -> dict[str, Any]:
        if self.speculative is None:
            return dict(SIZES)
        return {**SIZES, "speculative_config": dict(self.speculative)}


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(None),
    "fixed": Scenario(FIXED),
    "fixed, sampled from anchors": Scenario({**FIXED, **ANCHORED}),
    "planned": Scenario(DFLASH),
    "free drafts": Scenario(DFLASH, REPEATING),
    "DFlash 2": Scenario({**DFLASH, "model": str(DEMO / "drafter2")}),
    "LiLiCorr": Scenario({**DFLASH, "model": str(DEMO / "lilicorr")}),
    "trees": Scenario({**DFLASH, "draft_tree": 15}, has_trees=True),
}


def outcome_of(llm: LLM, scenario: Scenario) -> dict[str, Any]:
    """Return what it writes, step by step, and what it counts; plain values only."""
    steps = tokens_by_step(llm, scenario.prompts, greedy(NEW_TOKENS, ignore_eos=True))
    if scenario.speculative is None:
        return {"steps": steps}
    (stats,) = llm.collective_rpc("dflash_stats")
    statistics = runner_of(llm).speculator.statistics
    counters = {
        name: count for name, count in statistics.counts().items() if not name.endswith("_seconds")
    }
    changes = {name: stats[name] for name in stats if name.endswith("after_warmup")}
    lengths = {"draft_lengths": stats["draft_lengths"]}
    return {"steps": steps, "counters": counters | changes | lengths}


def tokens_of(outcome: dict[str, Any]) -> list[list[int]]:
    return joined(outcome["steps"])


def models_stream_ahead(llm: LLM) -> None:
    """Run the model's stream ahead: copies to the host, and all other streams, fall behind."""
    torch_cuda.set_schedule(Schedule.SOME_AHEAD, (0, runner_of(llm).main_stream.stream_id))


def other_streams_ahead(llm: LLM) -> None:
    """Run other streams ahead: they do not find what the model's stream has not done yet."""
    models = {0, runner_of(llm).main_stream.stream_id}
    others = set(torch_cuda.device().pending()) - models
    torch_cuda.set_schedule(Schedule.SOME_AHEAD, tuple(others))


def seeded(seed: int) -> Callable[[LLM], None]:
    return lambda llm: torch_cuda.set_schedule(Schedule.RANDOM, seed=seed)


SCHEDULES: dict[str, Callable[[LLM], None]] = {
    "at once": lambda llm: torch_cuda.set_schedule(Schedule.AT_ONCE),
    "latest": lambda llm: torch_cuda.set_schedule(Schedule.LATEST),
    "model ahead": models_stream_ahead,
    "others ahead": other_streams_ahead,
    "random 1": seeded(1),
    "random 2": seeded(2),
}
