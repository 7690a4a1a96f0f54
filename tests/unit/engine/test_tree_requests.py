"""Who gets draft trees, and how many places are kept for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_dflash.engine.v2.trees.tree_requests import PlacesOfTrees, may_branch


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"min_p": 0.1},
        {"min_tokens": 2, "max_tokens": 5},
        {"logprobs": 0},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(regex="a*")},
        {"extra_args": {"any": 1}},
    ],
)
def test_what_depends_on_the_tokens_before_needs_a_chain(setting: dict[str, Any]) -> None:
    assert not may_branch(SamplingParams(**setting))


def test_what_is_drawn_from_a_rows_logits_may_be_a_tree() -> None:
    drawn = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=3, stop=["x"], max_tokens=3)
    assert may_branch(drawn)
    assert may_branch(SamplingParams(temperature=0.0, ignore_eos=True))
    assert not may_branch(None)


def requests(*params: SamplingParams) -> Any:
    return {str(n): SimpleNamespace(sampling_params=each) for n, each in enumerate(params)}


def test_places_for_trees_and_for_chains() -> None:
    """One that may have a tree, one that may not, one near its end, one without drafts, and one
    that is gone."""
    fine, logprobs = SamplingParams(), SamplingParams(logprobs=1)
    living = requests(fine, logprobs, fine, fine)
    found = PlacesOfTrees(31).places(
        np.array([7, 7, 4, 0, 7]),
        list("01234"),
        living,
        np.array([100, 100, 488, 100, 100]),
        np.full(5, 500),
        1000,
    )
    assert found.tolist() == [31, 7, 10, 0, 7]


def test_a_step_has_rows_for_all_requests() -> None:
    """vLLM would leave out those that come last."""
    living = requests(*[SamplingParams()] * 4)
    batch = list("0123"), living, np.full(4, 100), np.full(4, 500)
    places = PlacesOfTrees(31)
    assert places.places(np.full(4, 7), *batch, 64).tolist() == [15] * 4
    assert places.places(np.full(4, 7), *batch, 16).tolist() == [7] * 4  # as without trees


def test_requests_that_are_over_are_forgotten() -> None:
    places = PlacesOfTrees(3)
    for number in range(20):
        living = {str(number): SimpleNamespace(sampling_params=SamplingParams())}
        nothing = np.zeros(1, np.int64)
        places.places(nothing + 1, [str(number)], living, nothing, nothing + 50, 99)
    assert len(places._may_branch) < 6
