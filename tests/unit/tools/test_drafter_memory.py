"""`vllm-dflash inspect`: how much memory a drafter takes: its weights, its KV cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from vllm.platforms import current_platform

from support.inspected import SMALL, inspect
from support.pairs import Pair, changed_drafter, drafter_config, lilicorr_config
from support.quantised import OF_THE_HEAD, quantise
from support.targets import make_target
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.names import LATTICE
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.tools.inspect.inspection import make_tables
from vllm_dflash.tools.inspect.memory import loaded_weights


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_the_cache(pair: Pair, size: int) -> None:
    """Two key/value heads: four ranks keep one each."""
    asked = {**SMALL, "tensor_parallel_size": size}
    found = inspect(pair.drafter, pair.target, asked)
    assert found.memory is not None
    assert found.memory.drafter_cache_per_token == 2 * 2 * max(1, 2 // size) * 32 * 4


def test_a_drafter_that_does_not_divide_is_whole_on_every_rank(pair: Pair, tmp_path: Path) -> None:
    asked = {**SMALL, "tensor_parallel_size": 2}
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3}
    found = inspect(changed_drafter(tmp_path, **shape), pair.target, asked)
    assert found.exit_code == 0
    assert found.memory is not None
    assert found.tensors is not None
    assert found.memory.drafter_tensor_parallel_size == 1
    stacked = 2 * (2 * 3 * 32 * 64 + 32) * 4  # K and V projections once more, and K norms
    assert found.memory.drafter_weights == found.tensors.num_bytes + stacked
    assert found.memory.drafter_cache_per_token == 2 * 2 * 3 * 32 * 4
    rows = [row for table in make_tables(found) for row in table.rows]
    assert ("drafter's layers", "whole on every rank: they do not divide") in rows


def test_quantised_tensors_with_old_names(pair: Pair, tmp_path: Path) -> None:
    """A LiLiCorr head that is quantised takes the same memory under its numbered names."""
    plain = changed_drafter(tmp_path, **lilicorr_config())
    quantise(plain, tmp_path / "new", left_out=("lm_head", *OF_THE_HEAD))
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    stored = load_file(tmp_path / "old" / "model.safetensors")
    numbered = {
        name: name.replace(".mlp.up_proj.", ".mlp.0.")
        for name in stored
        if name.startswith(LATTICE)
    }
    assert any(name != old for name, old in numbered.items())
    old = {numbered.get(name, name): tensor for name, tensor in stored.items()}
    save_file(old, tmp_path / "old" / "model.safetensors")
    by_new, by_old = (inspect(tmp_path / name, pair.target, SMALL) for name in ("new", "old"))
    assert by_old.memory == by_new.memory
    assert by_old.warnings == by_new.warnings


@pytest.mark.parametrize("is_cpu", [True, False])
def test_windows_are_lost_on_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cpu: bool
) -> None:
    """For a target with windows, long contexts cost more with DFlash than the drafter does."""
    make_target(tmp_path, "gemma4")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 65536}))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
    found = inspect(changed_drafter(tmp_path), tmp_path, {})
    assert any("have a sliding window" in one for one in found.warnings) == is_cpu
    assert any("tokens: drafts beyond them may be worse" in one for one in found.warnings)


@pytest.mark.parametrize(
    ("cache", "drafters", "num_bytes"),
    [
        ("auto", None, 32 * 4),
        ("fp8", None, 32),
        ("auto", "fp8_e5m2", 32),
        ("fp8_per_token_head", None, 32 + 4),  # with a scale per vector
    ],
)
def test_quantised_caches(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, cache: str, drafters: str | None, num_bytes: int
) -> None:
    """Two layers with 2 heads of 32 numbers each; on CPUs there are no scales."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: "token" not in cache)
    options = {**SMALL, "kv_cache_dtype": cache, "draft_kv_cache_dtype": drafters}
    found = inspect(pair.drafter, pair.target, options)
    assert found.memory is not None
    assert found.memory.drafter_cache_per_token == 2 * 2 * 2 * num_bytes
    asked = found.speculative_config
    assert asked is None or asked.get("kv_cache_dtype") == drafters


@pytest.mark.parametrize("packed", ["fp8_per_token_head", "nvfp4"])
def test_what_vllm_packs_is_not_counted(pair: Pair, packed: str) -> None:
    options = {"dtype": "float32", "kv_cache_dtype": packed}
    found = inspect(pair.drafter, pair.target, options)
    assert found.memory is not None
    assert found.memory.drafter_cache_per_token is None
    assert any("KV cache" in one for one in found.not_checked)


@pytest.mark.parametrize("option", ["kv_cache_dtype", "draft_kv_cache_dtype"])
def test_a_cache_dtype_that_vllm_does_not_know_is_refused(pair: Pair, option: str) -> None:
    found = inspect(pair.drafter, pair.target, {option: "fp9"})
    assert found.error is not None
    assert "'fp9' is none of auto, " in found.error
    assert found.command is None


def test_ranks_divide_the_weights() -> None:
    """Two ranks halve all but the context's projection and the norms; a head is never halved."""
    spec = parse_config("it", drafter_config(num_key_value_heads=1))
    one, two = loaded_weights(spec, {}, 2, 1), loaded_weights(spec, {}, 2, 2)
    kept_rows = spec.hidden_size * len(spec.taps) * spec.hidden_size + 2 * spec.hidden_size  # norms
    per_layer = 2 * spec.hidden_size + 2 * spec.head_dim  # norms
    per_layer += 2 * spec.head_dim * spec.hidden_size  # the only key/value head
    stacked = 2 * spec.head_dim * spec.hidden_size + spec.head_dim  # the same, for the context
    kept = 2 * (kept_rows + spec.num_layers * (per_layer + stacked))
    assert two - kept == (one - kept) / 2


def test_all_ranks_share_a_vocabulary_of_its_own() -> None:
    """Even if the layers do not divide and are whole on each rank."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3}
    spec = parse_config("it", drafter_config(**shape))
    own = {"embed_tokens.weight": Tensor((spec.vocab_size, spec.hidden_size), "F32")}
    for ranks in (1, 2, 4):
        layers, whole = (loaded_weights(spec, found, 4, ranks) for found in ({}, own))
        assert whole - layers == spec.vocab_size // ranks * spec.hidden_size * 4
