"""Planning a step ahead, in a simulated pipeline with recorded drafts of a real pair.

It is compared with what is known in hindsight: plain decoding, and the best of all fixed lengths.
`benchmarks/device_decides.py` has all requests and machines; here is a choice of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from support.ahead_scheduler import Fixed
from support.cost_table import CostTable
from support.judge import REGIMES, Regime, fixed_rates, ours, planner_of, rate_of
from support.recorded_drafts import RecordedDrafts, recorded_drafts
from support.simulated_pipeline import Pipeline
from vllm_dflash.planning.costs import Attention

GPU, CPU = CostTable.read("assumed_gpu"), CostTable.read("cpu_2_cores")
ALL = pytest.mark.parametrize("regime", REGIMES.values(), ids=[*REGIMES])


@pytest.fixture(scope="module")
def greedy() -> RecordedDrafts:
    return recorded_drafts()[0]


@pytest.fixture(scope="module")
def drawn() -> RecordedDrafts:
    return recorded_drafts()[1]


@pytest.fixture(scope="module")
def copies() -> RecordedDrafts:
    return recorded_drafts()[2]


@pytest.mark.parametrize(
    ("table", "count", "lengths"),
    [
        pytest.param(GPU, 1, (7,), id="gpu-1"),
        pytest.param(GPU, 16, (7,), id="gpu-16"),
        pytest.param(GPU, 256, (0,), id="gpu-256", marks=pytest.mark.slow),
        pytest.param(CPU, 4, (3,), id="cpu-4"),
        pytest.param(CPU, 64, (0,), id="cpu-64", marks=pytest.mark.slow),
    ],
)
@ALL
def test_blocks_alone_are_never_much_worse_than_the_best_fixed_length(
    greedy: RecordedDrafts, regime: Regime, table: CostTable, count: int, lengths: tuple[int, ...]
) -> None:
    """The best length is the one that is best in the benchmark."""
    found = best = 0.0
    for seed in range(3 if count == 16 else 1):
        best += max(fixed_rates(greedy, count, table, regime, lengths, seed=seed).values())
        found += rate_of(ours(greedy, count, table, regime, seed=seed))
    assert found > 0.98 * best


@ALL
def test_text_that_does_not_repeat_itself(drawn: RecordedDrafts, regime: Regime) -> None:
    """On the average of some texts: one or the other may end in a row of easy tokens."""
    best = blocks = both = 0.0
    for seed in range(3):
        best += max(fixed_rates(drawn, 16, GPU, regime, (3,), seed=seed).values())
        blocks += rate_of(ours(drawn, 16, GPU, regime, seed=seed))
        both += rate_of(ours(drawn, 16, GPU, regime, looks_up=True, seed=seed))
    assert blocks > 0.98 * best
    assert both > 0.97 * best


@pytest.mark.parametrize(
    ("table", "count", "times"),
    [
        pytest.param(GPU, 1, 4, id="gpu-1", marks=pytest.mark.slow),
        pytest.param(GPU, 8, 4, id="gpu-8"),
        pytest.param(CPU, 1, 2.5, id="cpu-1"),
        pytest.param(CPU, 8, 1.2, id="cpu-8", marks=pytest.mark.slow),
    ],
)
@ALL
def test_copies_are_written_faster(
    copies: RecordedDrafts, regime: Regime, table: CostTable, count: int, times: float
) -> None:
    """Faster than with blocks alone, and by less if rows are expensive."""
    alone = rate_of(ours(copies, count, table, regime), 2000)
    assert rate_of(ours(copies, count, table, regime, looks_up=True), 2000) > times * alone


@pytest.mark.parametrize(("count", "share"), [(1, 0.97), (16, 0.99), (256, 0.99)])
@ALL
def test_useless_drafts_cost_next_to_nothing(
    greedy: RecordedDrafts, regime: Regime, count: int, share: float
) -> None:
    useless, tokens = greedy.with_useless_blocks(), min(600 * count, 60_000)
    plain = Pipeline(Fixed(0), useless, count, GPU)
    pipeline = ours(useless, count, GPU, regime)
    for each in (plain, pipeline):
        each.run(tokens=tokens)
    assert pipeline.run(tokens=tokens) > share * plain.run(tokens=tokens)


def blocks_of(pipeline: Pipeline, steps: int) -> float:
    """Share of the last steps that ran a block."""
    return float(np.mean(pipeline.block_steps[-steps:]))


@pytest.mark.parametrize("count", [1, 4, 64])
@ALL
def test_a_drafter_that_becomes_good_is_found_out_soon(
    greedy: RecordedDrafts, regime: Regime, count: int
) -> None:
    """Even after the longest intervals between probes. One that becomes bad is found out, too, if
    not in a few steps: not every one is planned and learned from."""
    useless = greedy.with_useless_blocks()
    pipeline = ours(useless, count, GPU, regime)
    pipeline.run(steps=800)
    assert blocks_of(pipeline, 200) < 0.15
    pipeline.device.drafts = greedy
    pipeline.run(steps=400)
    assert blocks_of(pipeline, 50) > 0.9
    pipeline.device.drafts = useless
    pipeline.run(steps=450)
    assert blocks_of(pipeline, 150) < 0.4


@pytest.mark.parametrize("scale", [0.8, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [1, 64])
@ALL
def test_from_a_profile_that_is_wrong(
    greedy: RecordedDrafts, regime: Regime, count: int, scale: float
) -> None:
    right = rate_of(ours(greedy, count, GPU, regime))
    assert rate_of(ours(greedy, count, GPU, regime, scale=scale)) > 0.98 * right


@ALL
def test_one_long_context_is_left_out_and_short_ones_go_on(
    greedy: RecordedDrafts, regime: Regime
) -> None:
    """Reading 185,000 tokens for one more draft takes as long as a third of a step."""
    attention = Attention(plain=1e-8, draft=1e-8)
    more = np.array([0, 185_000, 0, 0])
    pipeline = ours(greedy, 4, GPU, regime, attention=attention, more_context=more)
    pipeline.run(steps=400)
    admitted = np.mean(pipeline.admitted[-300:], axis=0)
    assert admitted[[0, 2, 3]].min() > 2
    if not regime.ragged_ms:  # otherwise lengths are the same, or cost more
        assert admitted[1] < 0.5


@ALL
def test_requests_that_come_with_placeholders(greedy: RecordedDrafts, regime: Regime) -> None:
    """Their prompts are cached except for a token. vLLM's placeholders say nothing about drafts."""
    best = found = 0.0
    for seed in range(3):
        world: dict[str, Any] = {"caches_prompts": True, "seed": seed}
        best += max(fixed_rates(greedy, 16, GPU, regime, (7,), **world).values())
        pipeline = ours(greedy, 16, GPU, regime, **world)
        found += rate_of(pipeline)
    assert found > 0.98 * best
    expected, accepted = planner_of(pipeline).blocks.of_all
    assert 0.8 < accepted / expected < 1.2


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Make numbers that overflow an error, as they would be errors of the simulation."""
    with np.errstate(all="raise", under="ignore"):
        yield
