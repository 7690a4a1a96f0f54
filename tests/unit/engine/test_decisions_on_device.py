"""Which drafts the device chooses and what it learns from them, against plain Python; in
Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.decided_steps import World
from vllm_dflash.engine.v2.grading import TILE

pytestmark = pytest.mark.v2
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
    for _ in range(4):
        has_block = bool(world.random.random() < 0.8)
        world.step(num_requests, has_block=has_block, has_text=looks_up)


def test_more_requests_than_are_graded_at_a_time() -> None:
    world = World(2 * TILE + 3, 3, seed=0)
    for _ in range(3):
        world.step(2 * TILE + 3)
