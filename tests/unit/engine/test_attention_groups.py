"""Groups of the model runner that hold layers of the drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.engine.attention_groups import split_by_window

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
LAYERS = ["model.0", "model.1", "draft.0", "draft.1", "draft.2"]
WINDOWS = {"draft.0": 20, "draft.1": None, "draft.2": 20}


class Builder:
    """A metadata builder with a workspace that other builders can share."""

    requires_block_table_width = False

    def __init__(self, spec: FullAttentionSpec, names: list[str], config: Any, device: Any) -> None:
        self.kv_cache_spec, self.names, self.config = spec, names, config
        self.workspace: Any = None

    def _get_workspace_buffer(self) -> Any:
        self.workspace = self.workspace or object()
        return self.workspace

    def set_workspace_buffer(self, buffer: Any) -> None:
        self.workspace = buffer


class Backend(CPUAttentionBackend):
    """A backend named FlashInfer, or something else."""

    name = "FLASHINFER"

    @staticmethod
    def get_name() -> str:
        return Backend.name

    @staticmethod
    def get_builder_cls() -> Any:
        return Builder


def attentions(windows: dict[str, int | None]) -> Any:
    return [
        SimpleNamespace(attn=SimpleNamespace(layer_name=name), window=window)
        for name, window in windows.items()
    ]


def group(layers: list[str]) -> AttentionGroup:
    made = AttentionGroup(Backend, layers, SPEC, 3)
    made.create_metadata_builders("whole", "cpu", 32, 2)
    return made


def test_flashinfer_gets_a_group_for_each_window() -> None:
    """The target's layers stay in one group, and no layer is left out."""
    whole, alone = group(LAYERS), group(["model.2"])
    groups = [alone, whole]
    split_by_window(groups, attentions(WINDOWS), "config", "cpu")  # type: ignore[arg-type]
    assert groups[0] is alone
    found = [each.layer_names for each in groups[1:]]
    assert found == [["model.0", "model.1"], ["draft.0", "draft.2"], ["draft.1"]]
    workspace = whole.get_metadata_builder()._get_workspace_buffer()
    for each in groups[1:]:
        assert (each.backend, each.kv_cache_spec, each.kv_cache_group_id) == (Backend, SPEC, 3)
        assert len(each.metadata_builders) == 2
        for builder in each.metadata_builders:
            it: Any = builder
            assert (it.names, it.config) == (each.layer_names, "config")
            assert it.workspace is workspace


@pytest.mark.parametrize(
    ("name", "layers", "windows"),
    [
        ("FLASH_ATTN", LAYERS, WINDOWS),  # asks each layer for its window
        ("FLASHINFER", LAYERS, dict.fromkeys(WINDOWS)),
        ("FLASHINFER", ["draft.0", "draft.2"], WINDOWS),
        ("FLASHINFER", ["model.0", "model.1"], WINDOWS),
    ],
)
def test_other_groups_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    layers: list[str],
    windows: dict[str, int | None],
) -> None:
    monkeypatch.setattr(Backend, "name", name)
    whole = group(layers)
    groups = [whole]
    split_by_window(groups, attentions(windows), None, None)  # type: ignore[arg-type]
    assert groups == [whole]
    assert groups[0] is whole
    assert whole.layer_names == layers
