"""Draft trees on an emulated GPU: graphs whose attention follows trees."""

from __future__ import annotations

from typing import Any

import pytest

from support.emulated_runs import on_cpu, run, watched
from support.engines import FIXED, engine, greedy, proposer_of, token_ids
from support.schedules import GRAPHS, ON_GPU, PROMPTS, SIZES, tokens_of
from support.stepped_requests import joined, tokens_by_step
from vllm_dflash.engine.v2.trees import tree_kernels

pytestmark = pytest.mark.emulated
NODES = 7
"""As many as a block has drafts, so that trees have sizes that chains have graphs for."""
TEXTS = PROMPTS[:2]
WRITES = greedy(8, ignore_eos=True)
FEW = {**GRAPHS["compilation_config"], "cudagraph_capture_sizes": [2, 8, 16]}
"""Few graphs: kernels for trees take seconds in the interpreter."""


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few programs: an interpreter would run a GPU's number of them one after the other."""
    monkeypatch.setattr(tree_kernels, "_num_programs", lambda device: 2)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine(**SIZES, **ON_GPU) as llm:
        return token_ids(llm, TEXTS, WRITES)


def steps_of(schedule: str, *, has_graphs: bool) -> list[Any]:
    """Return tokens by step, with trees only."""
    settings: dict[str, Any] = {"speculative_config": {**FIXED, "draft_tree": NODES}}
    if has_graphs:
        settings |= {"compilation_config": FEW}
    with watched(schedule, has_graphs=has_graphs, max_num_seqs=2, **settings) as llm:
        assert proposer_of(llm).trees.is_attached
        return tokens_by_step(llm, TEXTS, WRITES)


def test_trees_in_graphs_step_as_they_do_without(plain: list[list[int]]) -> None:
    """Each step accepts as many nodes as without; the text would be right with any others, too."""
    found = steps_of("random 1", has_graphs=True)
    assert joined(found) == plain
    assert found == steps_of("latest", has_graphs=False)
    assert max(len(step) for of_prompt in found for step in of_prompt) > 2


@pytest.mark.slow
def test_planned_trees_step_and_count_as_on_the_cpu_platform() -> None:
    found = run("trees", "random 1", has_graphs=False)
    assert found == on_cpu("asynchronous: trees")
    assert tokens_of(found) == tokens_of(on_cpu("plain"))
