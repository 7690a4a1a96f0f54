"""Splitting a budget on the device, against vLLM's own in PyTorch; in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerificationManager,
    _assign_draft_token_budget,
)

from vllm_dflash.engine.v2.budget_split import FEW, split
from vllm_dflash.engine.v2.trimming import HAS_ADMITTED_COUNTS, DraftBudget

pytestmark = pytest.mark.v2
BONUS = 1


class Ends(NamedTuple):
    logits: torch.Tensor
    rows: torch.Tensor


def split_of(
    chances: torch.Tensor,
    slots: list[int],
    drafts: list[int],
    others: list[int],
    budget: int,
    *,
    fair: bool = False,
) -> Ends:
    """Split a budget, into memory that holds something else."""
    ends = Ends(*torch.full((2, len(chances) + 1), 99, dtype=torch.int32))
    rows = torch.tensor([drafts, others], dtype=torch.int32)
    split(chances, torch.tensor(slots), rows, budget, BONUS, *ends, fair=fair)
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
    """vLLM's split picks any of them. The slot that is not in the batch does not count."""
    chances = torch.tensor([[1.0, 0.5], [1.0, 1.0], [0.5, 1.0], [1.0, 0.5]])
    # Survival is 1 and 0.5, 0.5 and 0.5, 1 and 0.5.
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


@pytest.mark.parametrize("odd", [float("nan"), -float("nan"), -0.5, -0.0, float("inf")])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_every_draft_that_the_host_counts_on_is_admitted(odd: float, place: int) -> None:
    """Whatever its chance: rows that the host counts on and nobody fills would hold garbage."""
    chances = torch.full((2, 7), 0.5)
    chances[1, place] = odd
    for budget in range(8):
        ends = split_of(chances, [1], [7], [1], budget)
        assert ends.logits[:2].tolist() == [0, budget + BONUS]
        assert ends.rows.tolist() == [0, budget + 1, budget + 1]


@pytest.mark.parametrize("fair", [False, True])
def test_drafts_that_are_worth_next_to_nothing_are_admitted(fair: bool) -> None:
    """A GPU divides x by itself and may get less than 1, whose logarithm is negative. That ended
    engines on an H200."""
    count = 2000
    chances = torch.rand(count, 7, generator=torch.Generator().manual_seed(3)) * 0.3 + 0.01
    ends = split_of(chances, [*range(count)], [7] * count, [1] * count, 7 * count, fair=fair)
    assert ends.logits.tolist() == [*range(0, 8 * count + 1, 8)]


@pytest.mark.skipif(
    not HAS_ADMITTED_COUNTS, reason="only vLLM 0.33 shares batches whose drafts are trimmed"
)
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("share", [0, 3, 6])
def test_samplers_that_share_a_batch_are_told_what_was_admitted(copies: bool, share: int) -> None:
    """As vLLM's own manager tells them: nothing if the host knows."""
    width, count = 3, 4
    chances = torch.rand(6, width, generator=torch.Generator().manual_seed(1))
    slots, drafts, others = torch.tensor([4, 0, 5, 2]), [3, 0, 1, 2], [1, 1, 4, 1]
    names = [*"abcd"]
    states = SimpleNamespace(max_num_reqs=6, num_speculative_steps=width)
    whole: Any = object.__new__(AdaptiveVerificationManager)
    vars(whole).update(
        req_states=states,
        num_speculative_steps=width,
        num_bonus_tokens=BONUS,
        query_start_loc=torch.zeros(7, dtype=torch.int32),
        _cu_num_logits=torch.zeros(7, dtype=torch.int32),
        _confidence_probs=chances,
        _batch_draft_capacity=torch.zeros(6, dtype=torch.int32),
        _copy_admitted_drafts_to_host=copies,
    )
    budget: Any = DraftBudget.instead_of(whole, width, None)  # type: ignore[arg-type]
    parts = (dict(zip(names, part, strict=True)) for part in (drafts, others))
    budget._batch_budget = *parts, share
    ends, _, total, told = budget.reallocate_drafts(names, slots)
    assert total == share
    admitted = torch.tensor(drafts, dtype=torch.int32)
    _assign_draft_token_budget(chances, slots, admitted, share, width)
    assert (ends.diff() - BONUS).tolist() == admitted.tolist()
    assert (told is not None) == (copies and 0 < share < sum(drafts))
    if told is not None:
        assert told.wait().tolist() == admitted.tolist()
        assert len(told.wait()) == count
