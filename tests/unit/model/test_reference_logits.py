"""Logits of the reference drafter: the target's head, and what its family does behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import DEMO
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.model.reference import ReferenceDrafter

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
