"""Blocks cost what their rows do: K, and one more if the bonus row predicts none."""

from __future__ import annotations

import numpy as np
import pytest

from support.planner_world import straight
from vllm_dflash.planning.costs import CATCH_UP_STEPS, Attention, StepCosts


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_cost_what_their_rows_and_their_context_do(first: int) -> None:
    """0.25 ms a row, 0.05 ms to store one, and 1 ms to read a thousand tokens of context."""
    curves = straight(10, 1), straight(0.5, 0.25), straight(0.2, 0.05)
    costs = StepCosts(*curves, 64, Attention(block=1e-6), first_draft_row=first)
    count, width = np.array([[1], [3]]), np.array([2, 7])
    rows = np.array([[first + 2, first + 7], [3 * (first + 2), 3 * (first + 7)]])
    found = costs.blocks(count, width, 2000, waiting=4 * CATCH_UP_STEPS)
    assert found * 1000 == pytest.approx(0.5 + 0.25 * rows + 2 + 0.2 + 0.05 * (count + 4))
