"""How sure the drafter is of each token, on the device."""

from __future__ import annotations

import pytest
import torch

from vllm_dflash.engine.v2.confidence import CONFIDENCE_ROWS, write_confidence


@pytest.mark.parametrize("num_rows", [1, CONFIDENCE_ROWS, 2 * CONFIDENCE_ROWS + 3])
def test_the_likeliest_tokens_probability(num_rows: int) -> None:
    """Of all rows, however many parts they are done in; what is behind stays."""
    logits = torch.randn(num_rows, 9, generator=torch.Generator().manual_seed(0))
    out = torch.full((num_rows + 1,), 7.0)
    write_confidence(logits, logits.max(dim=-1).values, out)
    torch.testing.assert_close(out[:-1], logits.softmax(dim=-1).max(dim=-1).values)
    assert out[-1] == 7.0


def test_rows_that_are_not_finite_say_so() -> None:
    logits = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [torch.inf, 0.0], [0.0, 0.0]])
    out = torch.zeros(4)
    write_confidence(logits, logits.max(dim=-1).values, out)
    assert out[1:3].tolist() == [-1.0, -1.0]
    assert out[3] == 0.5
