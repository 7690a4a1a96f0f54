"""What a worker on Model Runner V2 knows of trees before a step runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_dflash.engine.draft_trees import DraftTrees, KeptTree, VerifiedTrees
from vllm_dflash.engine.v2.device_trees import DeviceTrees
from vllm_dflash.engine.v2.tree_kernel import TreeRows

PARENTS = np.array([-1, 0, -1, 2])
TREE = KeptTree(
    np.array([10, 11, 20, 21]),
    PARENTS,
    np.array([True, True, False, False]),
    np.zeros((2, 2), np.int64),
)


def device_trees() -> Any:
    trees: Any = object.__new__(DeviceTrees)
    trees.kept = DraftTrees(4)
    trees.kept._kept = {"a": TREE, "b": TREE}
    trees._branching, trees._drafts = {"b": True, "gone": True}, {}
    trees._layers = SimpleNamespace()
    trees._rows = TreeRows(
        torch.zeros(90, dtype=torch.int64),
        torch.zeros(90, dtype=torch.int32),
        torch.zeros(4, dtype=torch.int32),
    )
    return trees


def scheduled(resumed: set[str], new: dict[str, SamplingParams], drafts: Any = None) -> Any:
    return SimpleNamespace(
        finished_req_ids={"gone"},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, sampling_params=params) for name, params in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        scheduled_spec_decode_tokens=drafts or {},
    )


def test_a_resumed_requests_placeholders_are_not_its_old_tree() -> None:
    trees = device_trees()
    trees.expect(scheduled({"a"}, {}, {"a": [-1] * 4, "b": [-1] * 3}))
    assert trees.kept.first_tokens("a", 4) == []
    assert trees.kept.first_tokens("b", 3) == [10, 11, 20]


def test_who_may_have_trees_is_known_as_long_as_it_lives() -> None:
    """This runner draws by seed and position, so seeds are no obstacle."""
    trees = device_trees()
    new = {"c": SamplingParams(seed=5), "d": SamplingParams(repetition_penalty=1.5)}
    trees.expect(scheduled(set(), new))
    assert trees._branching == {"b": True, "c": True, "d": False}


@pytest.mark.parametrize("step", [None, "tree"])
def test_what_the_device_is_told_of_rows(step: Any) -> None:
    """A request of 70 rows of its prompt, one with a tree, one that decodes without drafts."""
    trees = device_trees()
    starts, counts = np.array([0, 70, 75]), np.array([70, 5, 1])
    positions = torch.cat([torch.arange(70), torch.arange(30, 35), torch.tensor([9])])
    batch: Any = SimpleNamespace(
        num_tokens=76, num_reqs=3, num_scheduled_tokens=counts, positions=positions.clone()
    )
    if step is not None:
        step = VerifiedTrees.of({1: TREE}, starts, np.array([0, 30, 9]))
    trees._tell(batch, starts, step)
    seen = trees._rows.ancestors[:76].numpy().view(np.uint64).tolist()
    assert seen[:70] == [2 ** min(row, 64) - 1 for row in range(70)]
    in_tree = [0b0, 0b1, 0b11, 0b100, 0b1100]
    assert seen[70:75] == (in_tree if step else [0b0, 0b1, 0b11, 0b111, 0b1111])
    depth = [0, 1, 2, 1, 2] if step else [0, 1, 2, 3, 4]
    assert trees._rows.depths[70:76].tolist() == [*depth, 0]
    assert trees._rows.branches[:3].tolist() == [0, int(step is not None), 0]
    assert batch.positions[70:75].tolist() == [30 + each for each in depth]
    assert batch.positions[:70].tolist() == list(range(70))
    if step is not None:
        step.paths[1] = []
        trees.kept.step, trees._layers.settle = step, lambda *_: None
        trees.settle(batch, {}, [])
        assert torch.equal(batch.positions, positions)
