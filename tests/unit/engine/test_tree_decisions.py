"""Draft trees that the device grows and walks, against plain Python; in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.grown_trees import SLOTS, Grown
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS, Batch, DraftSlots
from vllm_dflash.engine.v2.drawing import DrawingVerifier
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.trees import tree_walk
from vllm_dflash.engine.v2.trees.tree_walk import TreeVerifier
from vllm_dflash.planning.step import BLOCK, TEXT

pytestmark = pytest.mark.v2
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=settings().max_examples // 3)
@given(SEEDS, st.sampled_from([1, 3, 7, 15]), st.sampled_from([1, 2, 8, 15, 64]), st.booleans())
def test_trees_are_grown_as_by_hand(seed: int, width: int, nodes: int, is_wide: bool) -> None:
    """Parents come before their nodes, so cutting the end leaves a tree. Chances multiply to
    survival, corrected by the request's own ratio and that of all requests."""
    world = Grown(seed, width, nodes, max(width, nodes) + is_wide)
    world.grow()
    for request, expected in enumerate(world.by_hand):
        world.check(request, expected)
        parents = np.array(expected.parents)
        assert (parents < np.arange(nodes)).all()
    assert (world.drafts[-1] == -5).all()
    untouched = np.setdiff1d(np.arange(SLOTS), world.of_request)
    assert not world.trees.tokens[untouched].any()


def test_chains_where_there_are_no_trees() -> None:
    """Requests that must not have a tree, that are in their prompt, or whose text is followed."""
    world = Grown(1, 3, 8, 8, requests=5)
    first, forbidden, in_prompt, with_text, last = range(5)
    world.trees.may_branch[world.of_request[forbidden]] = 0
    world.sampled[in_prompt] = 0
    world.slots.records[world.of_request[with_text], 0] = TEXT
    world.trees.sizes.fill_(8)
    world.grow()
    for request in (forbidden, in_prompt, with_text):
        assert world.trees.sizes[world.of_request[request]] == 0
        chain = world.chosen.tokens[request].tolist()
        newest = int(world.newest[world.of_request[request]])
        assert world.drafts[request].tolist() == chain + [newest] * 5
        assert (world.chances[request, :3] == world.chosen.chances[request]).all()
        assert (world.chances[request, 3:] == 0.0).all()
    for request in (first, last):
        world.check(request, world.by_hand[request])
    world.grow(has_block=False)
    assert not world.trees.sizes[world.of_request].any()


def test_the_most_likely_chain_of_a_tree_is_graded_as_a_chain() -> None:
    """One request had a tree with a chain of three, of which two were accepted. The other had a
    chain, in more draft slots than a block has drafts."""
    slots = DraftSlots(2, 4, CPU)
    slots.records[:, 0] = BLOCK
    confidence = slots.records[:, NUM_RECORD_FIELDS : NUM_RECORD_FIELDS + 4]
    confidence[:] = torch.tensor([0.9, 0.7, 0.5, 0.4])
    there, texts = torch.tensor([1, 0]), torch.zeros(2, 20, dtype=torch.int32)
    sampled, rejected = torch.tensor([4, 6]).int(), torch.tensor([7, 3]).int()
    lens, newest = torch.tensor([9, 9]).int(), torch.zeros(2, 1, dtype=torch.int64)
    batch = Batch.allocate(2, texts, lens, newest)
    outcomes = torch.full((2, OUTCOME_COLUMNS + 4), 99.0)
    chains = torch.tensor([[3, 2, 3, 4, 4], [-1] * 5]).int()
    grade(slots, batch, there, sampled, rejected, outcomes, chains)
    assert outcomes[:, [1, 6, 7]].tolist() == [[10, 3, 2], [8, 4, 4]]
    assert outcomes[:, 8:11].tolist() == [[3, 4, 4], [0, 0, 0]]
    torch.testing.assert_close(slots.records[1, 2:4], torch.tensor([0.9 + 0.7 + 0.5, 2.0]))
    torch.testing.assert_close(slots.records[0, 2:4], torch.tensor([2.5, 4.0]))


@settings(max_examples=settings().max_examples // 2)
@given(SEEDS, st.sampled_from([1, 8, 33, 64]), st.integers(0, 3))
def test_trees_are_walked_as_by_hand(seed: int, nodes: int, start: int) -> None:
    """Trees of any size, cut anywhere, beside requests without one. Walks the part of a batch from
    `start` on."""
    world = Grown(seed, 7, nodes, nodes)
    world.grow()
    world.walk(start)


def test_a_batch_is_walked_in_the_parts_that_it_is_verified_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM verifies as many requests at a time as their logits have memory for."""
    verifier: Any = object.__new__(TreeVerifier)
    verifier.trees, walked = "trees", list[Any]()

    def verify(verifier: Any, _: object, parts: tuple[int, ...]) -> str:
        for count in parts:
            verifier.verify(
                "logits", "rows", "drafts", "positions", "ends", range(count), rows=None
            )
        return "output"

    monkeypatch.setattr(DrawingVerifier, "__call__", verify)
    monkeypatch.setattr(DrawingVerifier, "verify", lambda *_, **__: "verified")
    monkeypatch.setattr(tree_walk, "walk", lambda *given: walked.append(given))
    for parts in ((2, 3, 1), (4,)):
        assert verifier("logits", parts) == "output"
    shown = [(*given[2:], len(given[1]), given[0]) for given in walked]
    of_batches = [(0, 2), (2, 3), (5, 1), (0, 4)]
    assert shown == [("ends", "verified", *part, "trees") for part in of_batches]
