"""Settings that users combine: their values, engines in which every two meet, drafters for them.

Of the values of a setting, the first is the usual one and the others are what changes most.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support import DEMO
from support.crossed_requests import REASONING
from support.engines import DFLASH, TARGET, USES_V2
from support.quantised import OF_THE_HEAD, quantise

BLOCK, REQUESTS = 32, 4
"""Tokens of a cache block; requests at a time."""
SHORT, LONG = (80, 128) if USES_V2 else (96, 256)
"""Context limits."""
VLLMS_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

ONE_LEFT_OUT = "layers.1.self_attn.o_proj"

Changes = dict[str, Any]
NOTHING: Changes = {}
OF_DRAFTERS: dict[str, tuple[str, ...]] = {
    "drafter": ("dflash", "dflash2", "lilicorr"),
    "attention": ("both ways", "causal"),
    "vocabulary": ("whole", "reduced"),
    "weights": ("plain", "8-bit but for one"),
}
"""Variants of a checkpoint."""
SPECULATIVE: dict[str, dict[str, Changes]] = {
    "free_drafts": {"auto": NOTHING, "off": {"free_drafts": "off"}},
    "draft_length": {"adaptive": {"draft_length": "adaptive"}, "fixed": {"draft_length": "fixed"}},
    "draft_window": {"whole": NOTHING, "12 tokens": {"draft_window": 12}},
    "drafts": {
        "unsaid": NOTHING,
        "below the block": {"num_speculative_tokens": 3},
        "one": {"num_speculative_tokens": 1},
        "above the block": {"num_speculative_tokens": 12},
    },
    # Fewer nodes than the whole block has drafts, and more than one of 3.
    "draft_tree": {"off": NOTHING, "5 nodes": {"draft_tree": 5}},
}
"""Settings of the speculative config."""
OF_ENGINES: dict[str, dict[str, Changes]] = {
    "prefixes": {"cached": NOTHING, "not cached": {"enable_prefix_caching": False}},
    "rows": {
        "many": {"max_num_batched_tokens": 512},
        "64": {"max_num_batched_tokens": 64},
        "few": {"max_num_batched_tokens": 20},
    },
    "limit": {"long": {"max_model_len": LONG}, "short": {"max_model_len": SHORT}},
    "cache": {"enough": NOTHING, "little": NOTHING},  # depends on the limit
    "cache dtype": {"float32": NOTHING, "fp8": {"kv_cache_dtype": "fp8"}},
    "metrics": {"summed": NOTHING, "per request": {"per_request_spec_decode_metrics": "detailed"}},
    "policy": {"fcfs": NOTHING, "priority": {"scheduling_policy": "priority"}},
    "logprobs_mode": {"raw": NOTHING, "processed": {"logprobs_mode": "processed_logprobs"}},
    "scheduler": {"ours": NOTHING, "vLLM's": {"scheduler_cls": VLLMS_SCHEDULER}},
}
"""vLLM's own settings."""
ONLY_ON_V2: dict[str, dict[str, Changes]] = {
    "draft_tree": SPECULATIVE["draft_tree"],
    "scheduling": {"synchronous": NOTHING, "asynchronous": NOTHING},
}
FEWER_ON_V2: dict[str, tuple[str, ...]] = {
    "drafter": ("dflash", "dflash2"),  # LiLiCorr's is the same walk
    "drafts": ("unsaid", "below the block"),
    "rows": ("many", "few"),
    # These have nothing that depends on the runner.
    "weights": (),
    "policy": (),
    "logprobs_mode": (),
    "scheduler": (),
}
"""In Triton's interpreter an engine takes ten times as long."""


def _settings() -> dict[str, tuple[str, ...]]:
    """Return the settings to combine on this process's runner."""
    every = {**OF_DRAFTERS, **{n: tuple(v) for n, v in (SPECULATIVE | OF_ENGINES).items()}}
    if USES_V2:
        every |= {name: tuple(values) for name, values in ONLY_ON_V2.items()} | FEWER_ON_V2
    else:
        del every["draft_tree"]  # chains, with a line in the log
    return {name: values for name, values in every.items() if values}


SETTINGS = _settings()
NOT_TOGETHER = [
    {("drafter", "dflash2"), ("vocabulary", "reduced")},  # refused
    {("drafter", "lilicorr"), ("vocabulary", "reduced")},
    {("drafter", "dflash2"), ("draft_tree", "5 nodes")},  # chains, with a line in the log
    {("cache dtype", "fp8"), ("draft_tree", "5 nodes")},
]


def _combinations() -> list[dict[str, str]]:
    """Return combinations in which every two values of two settings meet; the same every time. Each
    is the one of many random ones that has most of what is missing."""
    dice = random.Random(0)
    tries = [{name: dice.choice(of) for name, of in SETTINGS.items()} for _ in range(800)]
    tries = [one for one in tries if not any(two <= one.items() for two in NOT_TOGETHER)]
    pairs = [set(map(frozenset, combinations(one.items(), 2))) for one in tries]
    missing, found = set[frozenset[tuple[str, str]]]().union(*pairs), []
    while missing:
        best = max(range(len(tries)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        found.append(tries[best])
    return found


COMBINATIONS = _combinations()


def described(combination: Mapping[str, str]) -> str:
    """Return which settings are not the usual ones."""
    unusual = [f"{name}: {it}" for name, it in combination.items() if it != SETTINGS[name][0]]
    return ", ".join(unusual) or "the usual"


def speculative_config(combination: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Return the user's config, with its own drafter in a folder."""
    config: dict[str, Any] = {**DFLASH, "model": str(make_drafter(folder / "drafter", combination))}
    for name, values in SPECULATIVE.items():
        if name in combination:
            config |= values[combination[name]]
    return config


def engine_settings(combination: Mapping[str, str]) -> dict[str, Any]:
    """Return vLLM's own settings."""
    settings: dict[str, Any] = {"max_num_seqs": REQUESTS, "block_size": BLOCK}
    settings["reasoning_config"] = REASONING  # some requests limit their thinking
    for name, values in OF_ENGINES.items():
        if name in combination:
            settings |= values[combination[name]]
    if combination.get("cache") == "little":  # for one request of full length, and a bit
        settings["num_gpu_blocks_override"] = settings["max_model_len"] // BLOCK + 3
    return settings


def make_drafter(folder: Path, combination: Mapping[str, str]) -> Path:
    """Make a drafter for the demo target, with these traits."""
    demo = {"dflash": "drafter", "dflash2": "drafter2", "lilicorr": "lilicorr"}
    source = DEMO / demo[combination.get("drafter", "dflash")]
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    if combination.get("attention") == "causal":
        config["dflash_config"]["causal"] = True
        config["layer_types"][0], config["sliding_window"] = "sliding_attention", 24
    if combination.get("vocabulary") == "reduced":
        columns = torch.arange(config["vocab_size"] * 3 // 4)
        kept = columns + columns // 3  # all except every fourth
        head = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]  # it is tied
        config["draft_vocab_size"] = len(kept)
        tensors |= {"lm_head.weight": head[kept], "d2t": kept - columns}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if combination.get("weights", "plain") == "plain":
        return folder
    quantised = folder.with_name("quantised")
    quantise(folder, quantised, left_out=("lm_head", ONE_LEFT_OUT, *OF_THE_HEAD))
    return quantised
