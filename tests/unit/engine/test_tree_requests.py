"""Which requests get draft trees, and how many draft slots are kept for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.v2.trees import tree_requests
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees
from vllm_dflash.engine.v2.trees.tree_planning import TreePlanner
from vllm_dflash.engine.v2.trees.tree_requests import may_branch, trees_unsupported_reason
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.planning.planner import Planner


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


def engine(**changes: Any) -> Any:
    """Fields of an engine's config that can rule out trees. `changes`: by name, owner__field."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        speculative_config=SimpleNamespace(rejection_sample_method="standard"),
        model_config=SimpleNamespace(uses_mrope=False, logits_processors=None, rswa_window=None),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=False)),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        kv_transfer_config=None,
        aux_output_config=SimpleNamespace(enabled=False),
    )
    for name, value in changes.items():
        owner, _, field = name.rpartition("__")
        setattr(getattr(config, owner) if owner else config, field, value)
    return config


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"kv_transfer_config": object()}, "connector"),
        ({"model_config__logits_processors": ["mine"]}, "logits processors"),
        ({"aux_output_config__enabled": True}, "routed experts"),
        ({"parallel_config__decode_context_parallel_size": 2}, "contexts are split"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill"),
        ({"model_config__rswa_window": 128}, "windows count"),
        ({"speculative_config__rejection_sample_method": "block"}, "method is 'block'"),
        ({"speculative_config__rejection_sample_method": "synthetic"}, "method is 'synthetic'"),
    ],
)
def test_engines_that_get_chains(changes: dict[str, Any], why: str | None) -> None:
    found = trees_unsupported_reason(engine(**changes))
    assert found == why or (why and found and why in found)


def test_installed_logits_processors_mean_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads them without being asked."""
    found = {"vllm.logits_processors": ["somebody's"]}
    monkeypatch.setattr(tree_requests, "entry_points", lambda group: found[group])
    assert "logits processors" in str(trees_unsupported_reason(engine()))


def test_without_a_step_that_walked_nothing_was_a_tree() -> None:
    """An engine that refuses trees then learns from its blocks as from chains."""
    assert (TreeSlots(3, 5, 5, torch.device("cpu")).chains == -1).all()


def requests(*params: SamplingParams) -> Any:
    return {str(n): SimpleNamespace(sampling_params=each) for n, each in enumerate(params)}


def draft_slots(
    chains: list[int], living: Any, *, names: str, context: list[int], most_rows: int = 1000
) -> list[list[int]]:
    """Return each request's draft slots with trees of 7, 15 and 31 nodes, up to a length of 500."""
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=7),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=most_rows + 7 * len(names)),
    )
    planner = TreePlanner(31, Planner(7, 8), config, 1000)
    lens, ends = np.array(context), np.full(len(names), 500)
    limits = planner.limits(
        draft_limits(lens, ends, 7, np.ones(len(names), bool)), list(names), living, lens, ends
    )
    found = planner._lengths_of_trees(np.array(chains), limits, list(names), living)
    return found.tolist()


def test_draft_slots_for_trees_and_for_chains() -> None:
    """One request may have a tree, one may not, one is near its end, one has no drafts, and one is
    gone."""
    fine, logprobs = SamplingParams(), SamplingParams(logprobs=1)
    living = requests(fine, logprobs, fine, fine)
    living = {name: living[name] for name in "3102"}
    found = draft_slots([7, 7, 4, 0, 7], living, names="01234", context=[100, 100, 488, 100, 100])
    assert found == [[7, 7, 7, 0, 7], [15, 7, 10, 0, 7], [31, 7, 10, 0, 7]]
    longer = draft_slots([15, 15], living, names="01", context=[100, 100])
    assert longer == [[7, 15], [15, 15], [31, 15]]  # chains are not cut


def test_a_step_has_rows_for_all_requests() -> None:
    """vLLM would leave out the requests that come last."""
    batch: dict[str, Any] = {"names": "0123", "context": [100] * 4}
    living = requests(*[SamplingParams()] * 4)
    assert draft_slots([7] * 4, living, **batch, most_rows=64)[-1] == [15] * 4
    assert draft_slots([7] * 4, living, **batch, most_rows=16)[-1] == [7] * 4  # as without trees


def test_new_requests_branch_by_their_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots count, not the order in which requests come. Other slots do not change."""
    trees = DraftTrees(6, 7, 15, 15, torch.device("cpu"))
    states: Any = SimpleNamespace(req_id_to_index={"old": 1, "free": 4, "logs": 0, "idle": 3})
    trees.is_attached, trees._states = True, states
    trees.slots.may_branch.fill_(9)
    trees.slots.sizes.fill_(5)
    monkeypatch.setattr(GPUModelRunner, "prepare_attn", lambda *_: "vLLM's")
    batch: Any = SimpleNamespace(
        idx_mapping=torch.tensor([1, 4, 0]), positions=torch.zeros(3), num_draft_tokens=0
    )
    runner: Any = None
    asked = {"logs": SamplingParams(logprobs=1), "free": SamplingParams()}
    new = [SimpleNamespace(req_id=name, sampling_params=one) for name, one in asked.items()]
    for newcomers in (new, []):
        step: Any = SimpleNamespace(scheduled_new_reqs=newcomers)
        trees.begin_step(step)
        assert trees._prepare_attn(runner, batch) == "vLLM's"
        assert trees.slots.may_branch.tolist() == [0, 9, 9, 9, 1, 9]
        assert trees.slots.sizes.tolist() == [0, 5, 5, 5, 0, 5]
    assert trees.slots.slots.tolist() == [1, 4, 0, 0, 0, 0]
