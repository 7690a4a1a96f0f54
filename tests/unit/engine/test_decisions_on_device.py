"""Which drafts are chosen on the device, and what it learns of them, against Python written out; in
Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.decided_steps import World
from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.engine.v2.grading import TILE
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.planning.ahead import BLOCK, NOBODY, TEXT
from vllm_dflash.planning.chances import AGREEMENT

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
    """Over several steps, in some of which the drafter rests; slots in no order, others left
    alone."""
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


def test_drafts_that_are_surely_accepted_promise_no_more_than_that() -> None:
    """A bias above 1 corrects chances to 1 at most; what is handed over multiplies up to them."""
    slots = DraftSlots(1, 3, CPU)
    slots.bias[0, :, 0], slots.bias[0, :, 1] = 10.0, 30.0
    chances = torch.zeros(1, 3)
    confidence = torch.tensor([[0.9, 0.8, 0.1]])
    ones = torch.ones(1, dtype=torch.int32)
    drafts, last = torch.tensor([[4, 5, 6]]), torch.tensor([[9]])
    choose(slots, torch.tensor([0]), ones, last, drafts, confidence, None, chances)
    of_all = (30 + 8) / (10 + 8)
    bias = (30 + 8 * of_all) / (10 + 8)
    corrected = np.minimum(np.cumprod([0.9, 0.8, 0.1]) * bias, 1.0)
    np.testing.assert_allclose(chances[0].cumprod(0), corrected, rtol=1e-6)
    assert chances[0, 0] == 1.0
    assert slots.source.tolist() == [BLOCK]
    assert slots.block_survival[0, 0] == pytest.approx(0.9)


def test_agreement_with_the_block_makes_a_text_surer() -> None:
    """So that it is chosen where the block alone would have been."""
    slots, found, chances = DraftSlots(2, 3, CPU), TextLookUp(2, 8, 3, CPU), torch.zeros(2, 3)
    found.tokens[:], found.lengths[:], found.matches[:] = torch.tensor([4, 5, 6]), 3, 2
    ones, last = torch.ones(2, dtype=torch.int32), torch.tensor([[9], [9]])
    drafts = torch.tensor([[4, 5, 0], [0, 5, 0]])
    confidence = torch.full((2, 3), 0.8)
    choose(slots, torch.tensor([1, 0]), ones, last, drafts, confidence, found, chances)
    assert slots.source.tolist() == [BLOCK, TEXT]
    assert drafts.tolist() == [[4, 5, 6], [0, 5, 0]]
    assert slots.matches.tolist() == [2, 2 + 2 * AGREEMENT]


def test_without_block_and_text_the_last_token_is_repeated() -> None:
    """A request in its prompt keeps what it has."""
    slots, chances = DraftSlots(2, 3, CPU), torch.ones(2, 3)
    drafts = torch.full((2, 3), 4)
    sampled, last = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[8], [9]])
    choose(slots, torch.tensor([1, 0]), sampled, last, drafts, None, None, chances)
    assert drafts.tolist() == [[9, 9, 9], [4, 4, 4]]
    assert not chances.any()
    assert slots.source.tolist() == [NOBODY, NOBODY]


def test_new_requests_start_from_nothing() -> None:
    """What others have is left alone."""
    slots = DraftSlots(3, 2, CPU)
    before = [each.data_ptr() for each in slots.buffers()]
    for each in (slots.source, slots.text_lengths, slots.bias):
        each.fill_(1)
    slots.forget(torch.tensor([2, 0]))
    assert slots.source.tolist() == slots.text_lengths.tolist() == [0, 1, 0]
    assert slots.bias[:, :, 0].tolist() == [[0, 1, 0, 1]] * 2
    slots.set_rates(np.full((2, 11), 0.25), np.full((2, 11), 0.5))
    assert slots.rates[:, 0, 0].tolist() == [0.25, 0.5]
    assert [each.data_ptr() for each in slots.buffers()] == before
