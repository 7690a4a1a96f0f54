"""Planning in simulated engines, beside the best fixed length in hindsight.

`benchmarks/planned_cells.py` has all cells. Here is a choice of them, each with the best of its
fixed lengths, and the least share of that one's rate.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.ahead_scheduler import Fixed
from support.cost_table import CostTable
from support.judge import REGIMES, Regime, ours, planner_of, rate_of
from support.judged_cells import GPU, SMALL_MODEL, cells
from support.recorded_drafts import recorded_drafts
from support.simulated_host import SimulatedHost, made_up
from support.simulated_pipeline import Pipeline
from vllm_dflash.planning.planner import Planner

CELLS = {cell.name: cell for cell in cells()}
V1: dict[str, tuple[Any, float]] = {
    "alike at 0.8, 1": (7, 0.98),
    "alike at 0.8, 8": (2, 0.975),
    "alike at 0.8, 32": (2, 0.975),
    "useless, 1": (0, 0.96),
    "useless, 8": (0, 0.975),
    "useless, 32": (0, 0.975),
    "short requests, useless, 8": (0, 0.975),
    "short requests, good, 8": (7, 0.975),
    "useless, good, useless, 1": (0, 0.96),
    "copies + texts, 8": (0, 1.36),
    "profile x 0.6, 8": (2, 1.2),
    "profile x 1.6, 8": (2, 1.18),
    "contexts of 1k to 60k": ((7, 7, 0, 0), 0.94),
    "one good, one bad": ((7, 0), 0.97),
    "four good, four bad": ((4,) * 4 + (0,) * 4, 0.98),
}
V2: dict[str, tuple[Any, float]] = {
    "greedy, 1": (7, 0.985),
    "greedy, 128": (3, 0.98),
    "drawn + texts, 32": (3, 0.975),
    "copies + texts, 8": (0, 4.3),
    "useless, 1": (0, 0.97),
    "useless, 16": (0, 0.985),
    "useless, 256": (0, 0.99),
    "good, useless, good, 64": (3, 1.0),
    "useless, good, useless, 64": (0, 0.985),
    "profile x 0.6, 64": (3, 0.98),
    "profile x 1.6, 64": (3, 0.98),
    "host limit, 1": (7, 0.98),
    "host limit, 32": (7, 0.97),
    "contexts of 1k to 60k, 8": (3, 1.02),
    "one good, one bad, 2": (7, 0.98),
}
FLOORS = {f"V1: {name}": floor for name, floor in V1.items()}
FLOORS |= {f"V2 {regime}: {name}": floor for regime in REGIMES for name, floor in V2.items()}
TOLD_APART = [name for name, cell in CELLS.items() if cell.is_mixed and name not in FLOORS]


@pytest.mark.parametrize("name", FLOORS)
def test_it_is_about_as_fast_as_the_best_fixed_length(name: str) -> None:
    length, share = FLOORS[name]
    assert length in CELLS[name].fixed
    assert CELLS[name].rate(0, None) > share * CELLS[name].rate(0, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOLD_APART)
def test_requests_that_stay_different_are_told_apart(name: str) -> None:
    """Nearly as fast as if it had been known which is which."""
    best = max(CELLS[name].rate(0, lengths) for lengths in CELLS[name].fixed)
    assert CELLS[name].rate(0, None) > 0.93 * best


def test_each_cell_has_a_name_of_its_own() -> None:
    """Results of two versions are compared by name."""
    assert len(CELLS) == len(cells()) > 100


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", [0, 1], ids=["greedy", "drawn"])
def test_where_the_host_is_the_limit_it_drafts_k_in_every_step(kind: int, count: int) -> None:
    """Once it has learned what a step takes, and whatever the drafter is worth. Some steps decode
    plainly, to measure what that takes, and those that follow verify nothing."""
    drafts, regime = recorded_drafts()[kind], REGIMES["captured lengths"]
    pipeline = ours(drafts, count, SMALL_MODEL, regime, host_ms=2.6)
    pipeline.run(steps=400)
    pipeline.run(steps=400)
    assert np.mean(pipeline.block_steps[-400:]) > 0.95
    assert np.mean(np.concatenate(pipeline.admitted[-400:]) == drafts.width) > 0.95


@pytest.mark.parametrize("regime", REGIMES.values(), ids=[*REGIMES])
def test_requests_that_come_with_placeholders(regime: Regime) -> None:
    """Their prompts are cached except for a token. vLLM's placeholders say nothing about drafts."""
    best, found, greedy = 0.0, 0.0, recorded_drafts()[0]
    for seed in range(3):
        world: dict[str, Any] = {"caches_prompts": True, "seed": seed}
        best += rate_of(Pipeline(Fixed(7), greedy, 16, GPU, **regime.world(), **world))
        pipeline = ours(greedy, 16, GPU, regime, **world)
        found += rate_of(pipeline)
    assert found > 0.98 * best
    expected, accepted = planner_of(pipeline).blocks.of_all
    assert 0.8 < accepted / expected < 1.2


def test_probes_become_rare_but_never_cease() -> None:
    table, drafted = CostTable.read("cpu_2_cores"), np.zeros((2, 20), np.int64)
    for number, counts in enumerate(drafted):
        seeds = 10 * number, 10 * number + 1
        streams = [made_up(0.02, length=2500, seed=seed, overrated=0.1) for seed in seeds]
        made = SimulatedHost(streams, table, looks_up=False, longest=2560)
        for place in range(20):
            made.drafted[:] = 0
            made.run(steps=100)
            counts[place] = made.drafted.sum()
    assert 0 < drafted[:, 10:].sum() < drafted[:, :10].sum() < 2 * 60
    assert (drafted[:, ::2] + drafted[:, 1::2]).min() > 0


def test_planning_never_sees_a_token() -> None:
    """Losslessness rests on this: token ids cannot reach the planner."""
    for name, method in inspect.getmembers(Planner, inspect.isfunction):
        assert not {"tokens", "token_ids", "sampled", "bonus"} & set(
            inspect.signature(method).parameters
        ), name


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Make numbers that overflow an error, as they would be errors of the simulation."""
    with np.errstate(all="raise", under="ignore"):
        yield
