"""Which drafts the device chooses and what it learns from them, against plain Python; in
Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.decided_steps import World
from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.draft_slots import HEAD, Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.grading import TILE
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.warm import tensors_of
from vllm_dflash.planning.chances import AGREEMENT
from vllm_dflash.planning.step import BLOCK, NO_DRAFTS, TEXT

pytestmark = [
    pytest.mark.usefixtures("runner"),
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
]
CPU = torch.device("cpu")
WIDTHS = st.sampled_from([1, 3, 7, 15])
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=settings().max_examples // 2)
@given(seed=SEEDS, width=WIDTHS, num_requests=st.integers(0, 6), looks_up=st.booleans())
def test_drafts_are_chosen_and_graded_as_by_hand(
    seed: int, width: int, num_requests: int, looks_up: bool
) -> None:
    """Several steps, in some of which the drafter rests. The slots are in no order, and other slots
    do not change."""
    world = World(7, width, seed)
    for number in range(4):
        if number == 2:
            world.learn_rates()
        has_block = bool(world.random.random() < 0.8)
        world.step(num_requests, has_block=has_block, has_text=looks_up)


def test_more_requests_than_are_graded_at_a_time() -> None:
    world = World(2 * TILE + 3, 3, seed=0)
    for _ in range(3):
        world.step(2 * TILE + 3)


def batch_of(slots: list[int], sampled: list[int], newest: list[int]) -> Batch:
    """A batch whose texts are not read."""
    there, came = torch.tensor(slots), torch.tensor(sampled, dtype=torch.int32)
    nothing = torch.zeros(0)
    return Batch(there, came, 0 * came, nothing, nothing, torch.tensor(newest)[:, None])


def drafts_of(tokens: list[list[int]], confidence: list[list[float]]) -> Drafts:
    sure = torch.tensor(confidence)
    return Drafts(torch.tensor(tokens), sure, torch.ones_like(sure))


def test_drafts_that_are_surely_accepted_promise_no_more_than_that() -> None:
    """A bias above 1 corrects survival to 1 at most. The chances handed over multiply to that."""
    slots, drafts = DraftSlots(1, 3, CPU), drafts_of([[4, 5, 6]], [[0.9, 0.8, 0.1]])
    for bias in (slots.records[0, 2:4], slots.records[0, 4:6], *slots.everybody):
        bias.copy_(torch.tensor([10.0, 30.0]))
    choose(slots, batch_of([0], [1], [9]), drafts, None, has_block=True)
    of_all = (30 + 8) / (10 + 8)
    bias = (30 + 8 * of_all) / (10 + 8)
    corrected = np.minimum(np.cumprod([0.9, 0.8, 0.1]) * bias, 1.0)
    np.testing.assert_allclose(drafts.chances[0].cumprod(0), corrected, rtol=1e-6)
    assert drafts.chances[0, 0] == 1.0
    assert slots.records[:, 0].tolist() == [BLOCK]
    assert slots.records[0, HEAD + 3] == pytest.approx(0.9)


def test_agreement_with_the_block_makes_a_text_surer() -> None:
    """The text is then chosen where the block alone would have been."""
    slots, found = DraftSlots(2, 3, CPU), TextLookUp(2, 8, 3, CPU)
    found.tokens[:], found.matches[:] = torch.tensor([4, 5, 6]), 2
    drafts = drafts_of([[4, 5, 0], [0, 5, 0]], [[0.8] * 3] * 2)
    choose(slots, batch_of([1, 0], [1, 1], [9, 9]), drafts, found, has_block=True)
    assert slots.records[:, 0].tolist() == [BLOCK, TEXT]
    assert drafts.tokens.tolist() == [[4, 5, 6], [0, 5, 0]]
    assert slots.records[:, 1].tolist() == [2, 2 + 2 * AGREEMENT]


def test_without_block_and_text_the_last_token_is_repeated() -> None:
    """A request in its prompt keeps what it has."""
    slots, drafts = DraftSlots(2, 3, CPU), drafts_of([[4] * 3] * 2, [[0.5] * 3] * 2)
    choose(slots, batch_of([1, 0], [1, 0], [8, 9]), drafts, None, has_block=False)
    assert drafts.tokens.tolist() == [[9, 9, 9], [4, 4, 4]]
    assert not drafts.chances.any()
    assert slots.records[:, 0].tolist() == [NO_DRAFTS, NO_DRAFTS]


def test_drafts_that_are_not_finite_are_told_from_none() -> None:
    """They are counted. A request in its prompt has none, nor has a step without a block."""
    slots, drafts = DraftSlots(2, 3, CPU), drafts_of([[4] * 3] * 2, [[0.5, 0.0, 0.5]] * 2)
    for has_block, expected in ((True, [[0.0] * 3, [0.5, -1.0, 0.5]]), (False, [[0.0] * 3] * 2)):
        choose(slots, batch_of([1, 0], [1, 0], [8, 9]), drafts, None, has_block=has_block)
        assert slots.records[:, HEAD : HEAD + 3].tolist() == expected


def test_new_requests_start_from_nothing() -> None:
    """Other slots do not change."""
    slots = DraftSlots(3, 2, CPU)
    before = [each.data_ptr() for each in tensors_of(slots)]
    slots.records.fill_(1)
    slots.forget(torch.tensor([2, 0]))
    assert slots.records[:, 0].tolist() == [0, 1, 0]
    assert slots.records.unique(dim=1).shape == (3, 1)
    slots.set_rates(np.full((2, 11), 0.25), np.full((2, 11), 0.5))
    assert slots.rates[:, 0, 0].tolist() == [0.25, 0.5]
    assert [each.data_ptr() for each in tensors_of(slots)] == before
