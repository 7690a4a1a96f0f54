"""The reference drafter: its files, and the target's head with what its family does after it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.reference_drafter import ReferenceDrafter
from support import DEMO
from support.pairs import drafter_config, save_drafter
from vllm_dflash.checkpoint.headers import INDEX
from vllm_dflash.checkpoint.read import read_drafter

HIDDEN = torch.tensor([[-8.0, 0.5, 4.0]])


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ({}, HIDDEN),
        ({"logit_scale": 0.25}, HIDDEN / 4),  # Cohere
        ({"logits_scaling": 8.0}, HIDDEN / 8),  # Granite
        ({"final_logit_softcapping": 2.0}, 2 * torch.tanh(HIDDEN / 2)),  # Gemma
    ],
)
def test_logits_are_the_targets(family: dict[str, float], expected: torch.Tensor) -> None:
    drafter = ReferenceDrafter(read_drafter(str(DEMO / "drafter")))
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**family))
    target: Any = SimpleNamespace(get_output_embeddings=torch.nn.Identity, config=config)
    torch.testing.assert_close(drafter.logits(HIDDEN, target), expected)


def test_files_that_no_index_names_are_left_out(tmp_path: Path) -> None:
    """As in vLLM: beside an index, they hold the same weights again under other names."""
    spec = save_drafter(tmp_path, drafter_config())
    weights = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file({"projection": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    drafter = ReferenceDrafter.load(spec, tmp_path)
    assert torch.equal(drafter.fc.weight, weights["fc.weight"])
