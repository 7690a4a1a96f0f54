"""Trees between being drafted and being verified: the scheduler has lists, and may cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_dflash.engine.v1.branching import may_branch
from vllm_dflash.engine.v1.draft_trees import DraftTrees
from vllm_dflash.planning.step import Candidates, Plan, Step, Trees
from vllm_dflash.planning.tree_acceptance import UNKNOWN

TOKENS = np.array([[[10, 11, 12], [20, 21, 22]]])
CHANCES = np.array([[[[0.5, 0.3, 0.1]], [[0.2, 0.6, 0.1]]]])
PARENTS = [-1, 0, -1, 0]
DRAFTS = [10, 21, 11, 20]


def kept(name: str = "a", lengths: int = 4) -> DraftTrees:
    """After a step that drafted 10 - 21 and 20 behind 10, and 11 beside it."""
    step = Step([name], np.array([1]), 1)
    step.plan = Plan(np.array([True]), 2, price=1.0, speedup=1.0)
    step.candidates = Candidates(TOKENS, CHANCES, np.array([True]), 4)
    step.trees = Trees(
        np.array([4]),
        np.array([PARENTS]),
        np.array([[0, 1, 0, 1]]),
        np.array([[0, 1, 1, 0]]),
        np.array([[0.5, 0.3, 0.3, 0.1]]),
        np.array([[True, True, False, False]]),
    )
    step.lengths = np.array([lengths])
    trees = DraftTrees(4)
    assert trees.keep(step) == [DRAFTS[:lengths]]
    return trees


def begin(
    trees: DraftTrees, drafts: list[int], name: str = "a", alive: tuple[str, ...] = ("a",)
) -> Any:
    return trees.begin(["z", name], [[], drafts], np.array([0, 1]), np.array([9, 5]), alive)


def test_a_tree_comes_back_as_it_was() -> None:
    step = begin(kept(), DRAFTS)
    assert list(step.trees) == [1]
    assert step.trees[1].parents.tolist() == PARENTS
    assert step.node_rows.tolist() == [2, 3, 4, 5]
    assert step.root_rows.tolist() == [1] * 4
    assert step.depths.tolist() == [1, 2, 1, 2]


def test_a_tail_that_the_scheduler_cut_off_is_left_out() -> None:
    assert begin(kept(), DRAFTS[:3]).trees[1].parents.tolist() == [-1, 0, -1]


@pytest.mark.parametrize("drafts", [DRAFTS[:2], [], [10, 21, 11, 99], [*DRAFTS, 5]])
def test_what_is_no_tree_of_ours_is_a_chain(drafts: list[int]) -> None:
    assert begin(kept(), drafts) is None


def test_drafts_are_verified_once() -> None:
    trees = kept()
    assert begin(trees, DRAFTS) is not None
    assert begin(trees, DRAFTS) is None


def test_drafts_of_a_request_that_waits_are_kept_and_of_one_that_is_over_are_not() -> None:
    trees = kept()
    assert begin(trees, [1], name="other", alive=("a", "other")) is None
    assert begin(trees, DRAFTS) is not None
    trees = kept()
    assert begin(trees, [1], name="other", alive=("other",)) is None
    assert begin(trees, DRAFTS) is None


def test_accepted_nodes_take_the_places_of_their_tokens() -> None:
    step = begin(kept(), DRAFTS)
    step.paths[1] = [0, 3]  # 10, and 20 behind it
    assert step.order(7).tolist() == [0, 1, 2, 5, 4, 5, 6]


@pytest.mark.parametrize(
    ("written", "fate"),
    [
        ([10, 21, 7], (2, 2, 3)),  # all of the chain
        ([10, 20, 7], (2, 1, 1)),  # the second of the second place
        ([11, 7], (2, 0, 1)),
        ([12], (2, 0, 2)),
        ([99], (2, 0, 3)),  # none of the candidates
        ([], (0, 0, UNKNOWN)),  # discarded
    ],
)
def test_the_fate_of_likeliest_tokens(written: list[int], fate: tuple[int, int, int]) -> None:
    trees = kept()
    begin(trees, DRAFTS)
    sampled = np.full((2, 5), -1)
    sampled[0, 0], sampled[1, : len(written)] = 3, written
    found = trees.fate(sampled, np.array([1, len(written)]))
    assert (found.verified[1], found.accepted[1], found.missed[1]) == fate
    assert (found.verified[0], found.accepted[0], found.missed[0]) == (0, 0, UNKNOWN)


def test_hazard_sampling_that_looks_at_earlier_tokens_gets_chains() -> None:
    assert may_branch(SamplingParams(temperature=0.7, top_p=0.9, top_k=20, max_tokens=9))
    for setting in (
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1},
        {"seed": 1},
        {"min_tokens": 3},
        {"logprobs": 1},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [5]},
        {"bad_words": ["no"]},
        {"structured_outputs": StructuredOutputsParams(choice=["yes"])},
        {"extra_args": {"mine": 1}},
    ):
        assert not may_branch(SamplingParams(**setting)), setting
    assert not may_branch(None)  # of a pooling model
