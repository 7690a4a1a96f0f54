"""A budget split on the device, against vLLM's own in PyTorch; in Triton's interpreter."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import _assign_draft_token_budget

from vllm_dflash.engine.v2.budget_split import FEW, split

pytestmark = [
    pytest.mark.usefixtures("runner"),
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
]
BONUS = 1


class Ends(NamedTuple):
    logits: torch.Tensor
    rows: torch.Tensor


def split_of(
    chances: torch.Tensor, slots: list[int], drafts: list[int], others: list[int], budget: int
) -> Ends:
    """Into memory that holds something else."""
    ends = Ends(*torch.full((2, len(chances) + 1), 99, dtype=torch.int32))
    rows = torch.tensor([drafts, others], dtype=torch.int32)
    split(chances, torch.tensor(slots), rows, budget, BONUS, *ends)
    return ends


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.sampled_from([1, 3, 15]),
    num_slots=st.sampled_from([1, 5, FEW + 9]),
    share=st.floats(0, 1),
)
def test_the_likeliest_drafts_as_vllm_would_have(
    seed: int, width: int, num_slots: int, share: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(num_slots, width, generator=random)
    count = int(torch.randint(1, num_slots + 1, (), generator=random))
    slots = torch.randperm(num_slots, generator=random)[:count]
    drafts = torch.randint(0, width + 1, (count,), generator=random)
    others = torch.randint(1, 4, (count,), generator=random)
    budget = int(share * int(drafts.sum()))
    admitted = drafts.int()
    if budget < int(drafts.sum()):
        _assign_draft_token_budget(chances, slots, admitted, budget, width)
    ends = split_of(chances, slots.tolist(), drafts.tolist(), others.tolist(), budget)
    assert ends.logits[: count + 1].tolist() == [0, *(admitted + BONUS).cumsum(0).tolist()]
    rows = [0, *(admitted + others).cumsum(0).tolist()]
    behind = num_slots - count
    assert ends.rows.tolist() == rows + behind * rows[-1:]
    assert (ends.logits[count + 1 :] == 99).all()


def test_of_equally_likely_drafts_the_first_requests_are_kept() -> None:
    """vLLM's picks any. Those of a slot that is not in the batch do not count."""
    chances = torch.tensor([[1.0, 0.5], [1.0, 1.0], [0.5, 1.0], [1.0, 0.5]])
    # Survival 1 and 0.5, 0.5 and 0.5, 1 and 0.5.
    for budget, kept in (
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (2, [1, 0, 1]),
        (3, [2, 0, 1]),
        (5, [2, 2, 1]),
        (6, [2, 2, 2]),
    ):
        ends = split_of(chances, [0, 2, 3], [2, 2, 2], [1, 1, 1], budget)
        assert (ends.rows[:4].diff() - 1).tolist() == kept
