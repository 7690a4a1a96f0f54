"""Which files of a folder hold its weights: the check before a start, `inspect`, vLLM's loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from support.drafter_harness import DrafterHarness
from support.inspected import inspect
from support.pairs import Pair, make_pair
from vllm_dflash.checkpoint.headers import INDEX
from vllm_dflash.checkpoint.spec import DrafterError

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Return a pair with a sharded drafter, and a file that its index does not name."""
    pair = make_pair(tmp_path)
    whole = pair.drafter / "model.safetensors"
    tensors = load_file(whole)
    half = len(tensors) // 2
    parts = (list(tensors)[:half], list(tensors)[half:])
    for name, part in zip(SHARDS, parts, strict=True):
        save_file({key: tensors[key] for key in part}, pair.drafter / name)
    whole.unlink()
    write_index(pair, {key: n for n, part in zip(SHARDS, parts, strict=True) for key in part})
    foreign = {f"layers.{i}.attention.wq.weight": torch.zeros(1) for i in range(3)}
    save_file(foreign, pair.drafter / "consolidated.safetensors")
    return pair


def write_index(pair: Pair, weight_map: Any) -> None:
    (pair.drafter / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_files_beside_an_index_are_ignored(pair: Pair) -> None:
    pair.start()
    found = inspect(pair.drafter, pair.target)
    assert found.exit_code == 0
    assert found.tensors is not None
    assert found.tensors.files == list(SHARDS)
    model = DrafterHarness(pair).proposer.model
    loader = DefaultModelLoader(LoadConfig())
    _, files, _, _ = loader._prepare_weights(
        str(pair.drafter), None, None, True, model.allow_patterns_overrides
    )
    assert sorted(Path(file).name for file in files) == list(SHARDS)


def test_a_bad_index_is_refused_by_both(pair: Pair) -> None:
    write_index(pair, {"norm.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(DrafterError, match=r"lacks 'model-00003-of"):
        pair.start()
    assert inspect(pair.drafter, pair.target).exit_code == 2
