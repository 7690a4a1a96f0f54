"""Repositories: headers come from the hub; without a network, the gap is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._safetensors import (
    SafetensorsFileMetadata,
    SafetensorsRepoMetadata,
    TensorInfo,
)
from transformers import PretrainedConfig

from support.inspected import inspect
from support.pairs import Pair, make_pair
from vllm_dflash.checkpoint.headers import read_folder

REPOSITORY = "someone/drafter"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(Path(tmp_path_factory.mktemp("pair")), own_vocabulary=True)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


@pytest.fixture
def config_at_hand(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the repository's config, and nothing else, available without a network."""
    config = json.loads((pair.drafter / "config.json").read_text())
    original = PretrainedConfig.get_config_dict

    def get_config_dict(model: Any, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return (config, {}) if model == REPOSITORY else original(model, **arguments)

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)


@pytest.mark.usefixtures("config_at_hand")
def test_the_hubs_headers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository has the folder's tensors in two files."""
    tensors = [
        (name, TensorInfo(tensor.dtype, list(tensor.shape), (0, 0)))  # type: ignore[arg-type]
        for name, tensor in read_folder(pair.drafter).tensors.items()
    ]

    def get_safetensors_metadata(repository: str, *, revision: str) -> SafetensorsRepoMetadata:
        assert (repository, revision) == (REPOSITORY, "abc")
        halves = enumerate((tensors[::2], tensors[1::2]))
        files = {f"{n}.safetensors": SafetensorsFileMetadata({}, dict(half)) for n, half in halves}
        return SafetensorsRepoMetadata(None, True, {}, files)

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", get_safetensors_metadata)
    found, here = (
        inspect(REPOSITORY, pair.target, revision="abc"),
        inspect(pair.drafter, pair.target),
    )
    assert found.exit_code == 0
    assert not found.not_checked
    assert found.tensors is not None
    assert here.tensors is not None
    assert found.tensors == replace(here.tensors, files=["0.safetensors", "1.safetensors"])
    assert found.memory == here.memory


@pytest.mark.usefixtures("config_at_hand")
def test_without_a_network(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is judged by its configs, and what was not checked is named."""

    def unreachable(repository: str, **arguments: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", unreachable)
    found = inspect(REPOSITORY, pair.target)
    assert found.exit_code == 0
    assert found.tensors is None
    (gap,) = found.not_checked
    assert gap.startswith("the drafter's tensors: ")
    assert "Name or service not known" in gap
    assert found.memory is not None


@pytest.mark.parametrize("which", ["drafter", "target"])
def test_not_even_a_config(pair: Pair, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    original = PretrainedConfig.get_config_dict

    def get_config_dict(model: Any, **arguments: Any) -> Any:
        if str(model).startswith("someone/"):
            raise OSError("We couldn't connect to 'https://huggingface.co'")
        return original(model, **arguments)

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = {"drafter": str(pair.drafter), "target": str(pair.target), which: f"someone/{which}"}
    found = inspect(names["drafter"], names["target"])
    assert found.exit_code == 2
    assert found.error is not None
    assert found.error.startswith(f"{which} 'someone/{which}'")
    assert "folder" in found.error
