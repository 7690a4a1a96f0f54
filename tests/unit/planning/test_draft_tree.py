"""Trees of drafts: the likeliest nodes, by brute force; what the target's tokens make of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning import Floats
from vllm_dflash.planning.chances import Chances
from vllm_dflash.planning.draft_tree import (
    MOST_CANDIDATES,
    accepted_path,
    calibrated,
    chains_in,
    grow,
)
from vllm_dflash.planning.step import Candidates, Trees

WIDTH = 3


def tree_of(
    chances: Floats, budget: int, *, limit: int = WIDTH, branches: bool = True, bias: float = 1.0
) -> Trees:
    """Of one request, by the drafter's own word; chances [w, P, C]."""
    tokens = np.arange(chances.shape[0] * chances.shape[2]).reshape(chances.shape[::2])
    candidates = Candidates(tokens[None], chances[None], np.array([branches]), budget)
    own_word = Chances.of(WIDTH, 0).rates, Chances.of(MOST_CANDIDATES, 0).rates
    return grow(candidates, np.array([limit]), np.array([bias]), *own_word)


def all_survivals(chances: Floats) -> list[float]:
    """Of every possible node, best first."""
    found = []
    width, num_before, count = chances.shape
    for depth in range(1, width + 1):
        for choice in itertools.product(range(count), repeat=depth):
            survival = 1.0
            for place, one in enumerate(choice):
                before = choice[place - 1] if place and num_before > 1 else 0
                survival *= chances[place, before, one]
            found.append(survival)
    return sorted(found, reverse=True)


@st.composite
def some_chances(draw: st.DrawFn) -> Floats:
    """Distributions over three candidates at each place, [3, P, 3]."""
    num_before = draw(st.sampled_from([1, 3]))
    numbers = st.floats(0.01, 1.0)
    raw = [draw(numbers) for _ in range(WIDTH * num_before * 4)]
    weights = np.array(raw).reshape(WIDTH, num_before, 4)  # the last one: all other tokens
    return (weights / weights.sum(axis=-1, keepdims=True))[:, :, :3]


@given(some_chances(), st.integers(1, 39))
def test_a_tree_has_the_likeliest_nodes_there_are(chances: Floats, budget: int) -> None:
    tree = tree_of(chances, budget)
    length = tree.lengths[0]
    assert length == min(budget, 3 + 9 + 27)
    best = all_survivals(chances)[:length]
    assert tree.survival[0, :length] == pytest.approx(best)


@given(some_chances(), st.integers(1, 39))
def test_nodes_stand_behind_their_parents_and_are_likelier_the_earlier(
    chances: Floats, budget: int
) -> None:
    tree = tree_of(chances, budget)
    seen = set()
    for node in range(tree.lengths[0]):
        parent = tree.parents[0, node]
        assert parent < node
        place = tree.places[0, node]
        assert place == (0 if parent < 0 else tree.places[0, parent] + 1)
        before = 0
        if chances.shape[1] > 1 and parent >= 0:
            before = tree.choices[0, parent]
        above = 1.0 if parent < 0 else tree.survival[0, parent]
        chance = chances[place, before, tree.choices[0, node]]
        assert tree.survival[0, node] == pytest.approx(above * chance)
        seen.add((parent, tree.choices[0, node]))
    assert len(seen) == tree.lengths[0]
    assert (np.diff(tree.survival[0, : tree.lengths[0]]) <= 0).all()


@given(some_chances(), st.integers(1, WIDTH))
def test_who_may_not_branch_gets_the_chain(chances: Floats, limit: int) -> None:
    tree = tree_of(chances, budget=20, limit=limit, branches=False)
    assert tree.lengths[0] == limit
    assert tree.parents[0, :limit].tolist() == list(range(-1, limit - 1))
    assert tree.is_first[0, :limit].all()
    before = 0
    for place, choice in enumerate(tree.choices[0, :limit]):
        assert choice == chances[place, before].argmax()
        before = choice if chances.shape[1] > 1 else 0


def test_no_node_lies_behind_the_last_place_that_can_be_used() -> None:
    chances = np.full((WIDTH, 1, 3), 0.3)
    assert tree_of(chances, budget=39, limit=2).places[0, :12].max() == 1
    assert tree_of(chances, budget=39, limit=2).lengths[0] == 3 + 9
    assert tree_of(chances, budget=39, limit=0).lengths[0] == 0


def test_a_place_whose_logits_were_not_finite_ends_the_tree() -> None:
    chances = np.full((WIDTH, 1, 3), 0.3)
    chances[1] = 0.0
    assert tree_of(chances, budget=39).lengths[0] == 3


def test_a_bias_corrects_survival_up_to_one_and_leaves_the_order() -> None:
    chances = np.array([[[0.6, 0.3]], [[0.5, 0.2]], [[0.5, 0.2]]])
    plain, biased = tree_of(chances, 5), tree_of(chances, 5, bias=2.0)
    assert biased.parents.tolist() == plain.parents.tolist()
    assert biased.survival[0, :5] == pytest.approx(np.minimum(2 * plain.survival[0, :5], 1.0))


def test_candidates_of_a_place_never_have_more_than_one_token_between_them() -> None:
    """Rates learned apart may say otherwise: the target writes one token in each place."""
    rates, rank_rates = Chances.of(1, 0).rates, Chances.of(3, 0).rates
    rates[:], rank_rates[:] = 0.9, 0.4
    order, found = calibrated(np.array([0.2, 0.5, 0.1]), 0, rates, rank_rates)
    assert order.tolist() == [1, 0, 2]
    assert found == pytest.approx([0.9, 0.05, 0.05])


def test_the_chain_in_a_tree_is_of_the_likeliest_tokens_of_their_places() -> None:
    chances = np.array([[[0.5, 0.4]], [[0.9, 0.05]], [[0.5, 0.2]]])
    tree = tree_of(chances, 4)
    # By survival: 0.5, 0.45 behind it, 0.4 its sibling, 0.36 behind that.
    assert tree.places[0].tolist() == [0, 1, 0, 1]
    assert tree.parents[0].tolist() == [-1, 0, -1, 2]
    assert tree.is_first[0].tolist() == [True, True, False, False]
    assert chains_in(tree.is_first, np.array([1])).tolist() == [1]
    assert chains_in(tree.is_first, tree.lengths).tolist() == [2]


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=8), st.data())
def test_the_accepted_path_is_the_way_that_the_target_writes(
    wanted: list[int], data: st.DataObject
) -> None:
    parents = np.array([min(parent, node - 1) for node, parent in enumerate(wanted)])
    tokens = np.full(len(parents), -1)
    for node, parent in enumerate(parents):  # siblings differ
        tokens[node] = (parents[:node] == parent).sum()
    sampled = np.array([data.draw(st.integers(0, 3)) for _ in range(len(parents) + 1)])
    path = accepted_path(parents, tokens, sampled)
    at = -1
    for node in path:
        assert parents[node] == at
        assert tokens[node] == sampled[1 + at]
        at = node
    assert not ((parents == at) & (tokens == sampled[1 + at])).any()
