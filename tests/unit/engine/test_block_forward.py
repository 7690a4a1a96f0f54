"""What becomes of the drafter's logits, with a model whose logits are given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dflash.engine.block_layout import block_inputs
from vllm_dflash.engine.v1.block_forward import BlockForward

NAN, INF = math.nan, math.inf
NO_BLOCKS = np.zeros(0, np.int64), np.zeros(0, np.int32), None
"""DFlash does not need to know which row belongs to which block."""


class Fake:
    """A drafter whose hidden states are its logits. Its vocabulary is the target's in reverse."""

    has_candidates = False

    def __init__(self) -> None:
        self.hidden = torch.zeros(0, 4)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any) -> torch.Tensor:
        assert len(input_ids) == len(positions) == len(self.hidden)
        return self.hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return 103 - tokens


@pytest.fixture
def model() -> Fake:
    return Fake()


@pytest.fixture
def block(model: Fake, monkeypatch: pytest.MonkeyPatch) -> BlockForward:
    """A block forward without an engine's forward context around the model."""
    config: Any = SimpleNamespace()
    made = BlockForward(model, config)  # type: ignore[arg-type]

    def run(*inputs: Any) -> torch.Tensor:
        return model(*inputs[2:])

    monkeypatch.setattr(made, "run", run)
    return made


def logits(*shares: float) -> list[float]:
    """Logits with these probabilities. A constant is added to all, which changes nothing."""
    return [math.log(share) + 3.5 for share in shares]


@pytest.mark.parametrize(
    ("bad", "finite"),
    [
        ([0.0, NAN, 9.0, 0.0], False),
        ([NAN] * 4, False),
        ([0.0, INF, 0.0, 0.0], False),
        ([-INF] * 4, False),
        ([0.0, -INF, -INF, -INF], True),  # impossible tokens do no harm
    ],
)
def test_confidence_is_a_probability_whatever_the_logits(
    block: BlockForward, bad: list[float], finite: bool
) -> None:
    """Also after a row that is not finite, and never NaN: the planner does not check it."""
    rows = torch.tensor([bad, logits(0.1, 0.6, 0.1, 0.2), bad])
    tokens, probability = block.pick(rows, *NO_BLOCKS)
    assert probability == pytest.approx([float(finite), 0.6, float(finite)])
    assert tokens[1] == 102


def test_each_requests_drafts_and_confidence_in_order(block: BlockForward, model: Fake) -> None:
    """Three requests with three drafts, one and two; bonus rows predict nothing. Drafts behind one
    that is not finite are dropped."""
    table = np.arange(16).reshape(4, 4)
    lengths = np.array([3, 0, 1, 2])
    inputs = block_inputs(np.array([5, 9, 2, 4]), lengths, np.arange(4), 77, table, 4)
    bonus_row, good = logits(0.97, 0.01, 0.01, 0.01), logits(0.1, 0.7, 0.1, 0.1)
    first = [bonus_row, good, [0.0, NAN, 0.0, 0.0], good]
    second = [bonus_row, logits(0.2, 0.26, 0.28, 0.26)]
    third = [[0.0, NAN, 0.0, 0.0], good, logits(0.1, 0.2, 0.2, 0.5)]
    model.hidden = torch.tensor(first + second + third)
    drafts = block.draft(inputs, torch.from_numpy(table), None)
    assert drafts.requests.tolist() == [0, 2, 3]
    assert drafts.tokens == [[102], [101], [102, 100]]
    assert drafts.confidence == pytest.approx(
        np.array([[0.7, 0.0, 0.7], [0.28, 0.0, 0.0], [0.7, 0.5, 0.0]])
    )
