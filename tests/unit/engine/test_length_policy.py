"""The same length for everybody, as far as each can use it."""

import numpy as np
import pytest

from support.planner_world import names, step_of
from vllm_dflash.engine.v1.length_policy import FixedLength


@pytest.mark.parametrize(
    ("limits", "width", "lengths"),
    [
        ([7, 0, 3], 5, [5, 0, 3]),
        ([0, 0, 1], 1, [0, 0, 1]),
        ([2, 4, 0], 4, [2, 4, 0]),
        ([0, 0, 0], 0, [0, 0, 0]),
        ([], 0, []),
    ],
)
def test_fixed_length_is_always_k_or_what_can_be_used(
    limits: list[int], width: int, lengths: list[int]
) -> None:
    fixed = FixedLength(5)
    step = step_of(names(len(limits)), np.zeros(len(limits), int), np.zeros(len(limits), int))
    step.limits = np.array(limits, dtype=int)
    step.plan = plan = fixed.plan(step)
    assert plan.drafted.tolist() == [limit > 0 for limit in limits]
    assert (plan.width, plan.price, plan.speedup, plan.is_probe) == (width, 0.0, 1.0, False)
    # However unsure: all of them.
    assert fixed.lengths(step, np.zeros((plan.drafted.sum(), width))).tolist() == lengths
