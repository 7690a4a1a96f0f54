"""Which files of a folder hold its weights: the check before a start, `inspect`, vLLM's loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.drafter_harness import DrafterHarness
from support.inspected import inspect
from support.pairs import Pair, make_pair
from vllm_dflash.checkpoint.headers import INDEX
from vllm_dflash.checkpoint.spec import DrafterError


@pytest.fixture(
    params=[
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        ("a.safetensors", "b.safetensors"),
    ]
)
def shards(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return the names of a drafter's files."""
    return request.param


@pytest.fixture
def pair(tmp_path: Path, shards: tuple[str, str]) -> Pair:
    """Return a pair with a sharded drafter, and files that its index does not name: one of an older
    download, and one of the same weights under other names."""
    pair = make_pair(tmp_path)
    whole = pair.drafter / "model.safetensors"
    tensors = load_file(whole)
    half = len(tensors) // 2
    parts = (list(tensors)[:half], list(tensors)[half:])
    for name, part in zip(shards, parts, strict=True):
        save_file({key: tensors[key] for key in part}, pair.drafter / name)
    whole.unlink()
    write_index(pair, {key: n for n, part in zip(shards, parts, strict=True) for key in part})
    stale = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(stale, pair.drafter / "model-00001-of-00003.safetensors")
    foreign = {f"layers.{i}.attention.wq.weight": torch.zeros(1) for i in range(3)}
    save_file(foreign, pair.drafter / "consolidated.safetensors")
    return pair


def write_index(pair: Pair, weight_map: Any) -> None:
    (pair.drafter / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.usefixtures("runner")
def test_files_beside_an_index_are_ignored(pair: Pair, shards: tuple[str, str]) -> None:
    found = inspect(pair.drafter, pair.target)
    assert found.exit_code == 0
    assert found.tensors is not None
    assert found.tensors.files == list(shards)
    loaded = DrafterHarness(pair).proposer.model
    meant = {key: one for name in shards for key, one in load_file(pair.drafter / name).items()}
    assert torch.equal(loaded.context.hidden_norm.weight, meant["hidden_norm.weight"])
    assert torch.equal(loaded.block.norm.weight, meant["norm.weight"])


def test_a_bad_index_is_refused_by_both(pair: Pair) -> None:
    write_index(pair, {"norm.weight": "model-00003-of-00003.safetensors"})
    with pytest.raises(DrafterError, match=r"lacks 'model-00003-of"):
        pair.start()
    assert inspect(pair.drafter, pair.target).exit_code == 2
