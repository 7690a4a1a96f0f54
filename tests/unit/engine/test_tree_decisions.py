"""Draft trees that the device grows and walks, against plain Python; in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from support.chi_square import p_value
from support.grown_trees import SLOTS, Grown
from support.trees_by_hand import grown
from vllm_dflash.engine.v2.draft_slots import NUM_RECORD_FIELDS, Batch, DraftSlots
from vllm_dflash.engine.v2.drawing import DrawingVerifier
from vllm_dflash.engine.v2.drawing_kernels import Verified
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.trees import tree_walk
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.v2.trees.tree_walk import TreeVerifier, walk
from vllm_dflash.planning.step import BLOCK, TEXT

pytestmark = pytest.mark.v2
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=settings().max_examples // 3)
@given(SEEDS, st.sampled_from([1, 3, 7, 15]), st.sampled_from([1, 2, 8, 15, 64]), st.booleans())
def test_trees_are_grown_as_by_hand(seed: int, width: int, nodes: int, is_wide: bool) -> None:
    """Parents come before their nodes, so cutting the end leaves a tree. Chances multiply to
    survival, corrected by the request's own bias and that of all requests."""
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


def test_the_likeliest_chain_of_a_tree_is_graded_as_a_chain() -> None:
    """One request had a tree with a chain of three, of which two were accepted. The other had a
    chain, in more places than a block has drafts."""
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


def test_what_is_walked_is_distributed_as_the_target_has_it() -> None:
    """At temperature 1, whatever the drafts are. vLLM's function draws pairs of tokens."""
    vocabulary, requests = 4, 500
    random = torch.Generator().manual_seed(5)
    first = torch.randn(vocabulary, generator=random)
    second = torch.randn(vocabulary, vocabulary, generator=random)  # after each first token
    tree = grown([[2, 0, 1], [3, 0, 2]], [[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], 6, last=0)
    trees = TreeSlots(requests, 2, 6, CPU)
    trees.sizes.fill_(6)
    trees.tokens[:], trees.parents[:] = torch.tensor(tree.tokens), torch.tensor(tree.parents)
    behind = [first, *(second[token] for token in tree.tokens)]  # not compared at depth 2
    starts, slots = 7 * torch.arange(requests + 1), torch.arange(requests)
    drawn = gumbel_sample(
        torch.stack(behind).repeat(requests, 1),
        slots.repeat_interleave(7),
        torch.ones(requests),
        100 + slots,
        torch.tensor([10, *(10 + depth for depth in tree.depths)]).repeat(requests),
        apply_temperature=False,
        is_drafting=False,
    )
    sampled = torch.zeros(requests, 7, dtype=torch.int64)
    num_sampled, num_rejected = torch.zeros(2, requests).int()
    walk(trees, slots, starts.int(), Verified(drawn, sampled, num_sampled, num_rejected))
    assert {1, 2, 3} == set(num_sampled.tolist())
    pairs, expected = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for tokens, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True):
        rest = second[tokens[0]].softmax(0)
        then = tokens[1] if count > 1 else int(rest.multinomial(1, generator=random))
        pairs[tokens[0], then] += 1
    for one in first.softmax(0).multinomial(requests, True, generator=random).tolist():
        expected[one, int(second[one].softmax(0).multinomial(1, generator=random))] += 1
    assert p_value(pairs, expected) > 0.01
    pairs[2, 3] += 120  # as if the walk preferred its drafts
    assert p_value(pairs, expected) < 0.01


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
