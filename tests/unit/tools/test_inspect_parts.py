"""Sizes, families and ranges of layers: the small parts of `vllm-dflash inspect`."""

from __future__ import annotations

from typing import Any

import pytest

from support.pairs import as_speculators, drafter_config
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.tools.inspect.family import resembles
from vllm_dflash.tools.inspect.inspect_report import layer_ranges, spans
from vllm_dflash.tools.inspect.inspection import LayerFacts
from vllm_dflash.tools.inspect.loaded_weights import loaded_weights
from vllm_dflash.tools.inspect.sizes import format_size, parse_size

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.5 gib", 3 << 29),
        ("512M", 512_000_000),
        ("64KiB", 65536),
        ("4 GB", 4_000_000_000),
        ("123", 123),
    ],
)
def test_sizes_that_people_write(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "4 apples", "1e9", "0.1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(640, "640 B"), (1536, "1.50 KiB"), (20 << 20, "20.0 MiB"), (5000 << 40, "5000 TiB")],
)
def test_sizes_that_people_read(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "Qwen3 "),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 1e4}}, "LLaMA-3.1"),
        ({**MIXED}, "Qwen3.5/3.6"),
        ({**MIXED, "dflash_config": {"target_layer_ids": list(range(6))}}, "gemma-4"),
        ({"rope_parameters": YARN}, "Kimi-K2.5"),
        ({"rope_parameters": YARN, "attention_bias": True}, "gpt-oss"),
        ({"attention_sink_bias": True, **MIXED}, "MiMo"),
        ({"draft_vocab_size": 100}, "speculators"),
        ({"dflash_config": {"use_prob_head": True}}, "AdaFlash"),
    ],
)
def test_families(changes: dict[str, Any], family: str) -> None:
    assert resembles(parse_config("it", drafter_config(**changes))).startswith(family)


def test_dialect_makes_no_family() -> None:
    config = drafter_config()
    spec = parse_config("it", as_speculators(config))
    assert spec.dialect == "speculators"
    assert resembles(spec) == resembles(parse_config("it", config))


def test_layers_of_a_kind_are_named_together() -> None:
    sliding, full = LayerFacts(2048, True), LayerFacts(None, False)
    assert layer_ranges([sliding, sliding, full, sliding]) == [
        ("0-1", "window of 2048 tokens, causal inside the block"),
        ("2", "whole context, not causal inside the block"),
        ("3", "window of 2048 tokens, causal inside the block"),
    ]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([1, 2, 3], "1, 2, 3"),
        ([1, 2, 3, 4], "1 to 4"),
        ([1, 2, 4, 8, 16, 24, 32], "1, 2, 4, 8 to 32 by 8"),
        ([8, 16, 24, 32, 48, 64, 80], "8 to 32 by 8, 48, 64, 80"),
    ],
)
def test_sizes_in_short(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


def test_ranks_divide_the_weights() -> None:
    """Two ranks halve all but the context's projection and the norms; a head is never halved."""
    spec = parse_config("it", drafter_config(num_key_value_heads=1))
    one, two = loaded_weights(spec, {}, 2, 1), loaded_weights(spec, {}, 2, 2)
    kept_rows = spec.hidden_size * len(spec.taps) * spec.hidden_size + 2 * spec.hidden_size  # norms
    per_layer = 2 * spec.hidden_size + 2 * spec.head_dim  # norms
    per_layer += 2 * spec.head_dim * spec.hidden_size  # the only key/value head
    kept = 2 * (kept_rows + spec.num_layers * per_layer)
    assert two.parameters - kept == (one.parameters - kept) / 2
    assert two.context_projection == one.context_projection
