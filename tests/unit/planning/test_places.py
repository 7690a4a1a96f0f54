"""Places for drafts on Model Runner V2, against the same computed as arrays of all steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.planner_world import straight_costs
from vllm_dflash.planning import Floats
from vllm_dflash.planning.forecast import Forecast
from vllm_dflash.planning.places import LEAST_WORTH, Expected, best_lengths, expect_blocks
from vllm_dflash.planning.thresholds import THRESHOLDS

K = 5
COSTS = straight_costs()


def curves_of(rng: np.random.Generator, count: int) -> Floats:
    """Survival of drafts; some requests have no drafts."""
    curves = rng.uniform(0.2, 1.0, (count, K)).cumprod(axis=1)
    return curves * (rng.uniform(size=(count, 1)) > 0.2)


def made_up(seed: int) -> tuple[Expected, Forecast, np.random.Generator]:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    forecast = Forecast(K, 8)
    for _ in range(int(rng.integers(0, 14))):
        forecast.observe(np.arange(8), rng.uniform(0.1, 1.0, (8, K)).cumprod(axis=1))
    limits, context = rng.integers(0, K + 1, count), rng.integers(1, 20_000, count)
    min_survival = rng.uniform(0.0, 0.6, count) * (rng.uniform(size=count) > 0.5)
    texts, scores = curves_of(rng, count), rng.uniform(0.0, 1.0, count)
    curves, groups = expect_blocks(texts, scores, forecast.summary)
    drafting = float(rng.choice([0.0, 0.004]))
    return Expected(limits, context, min_survival, curves, groups, drafting), forecast, rng


def rates_of(expected: Expected, kept: Floats, gain: Floats) -> Floats:
    """Rates of steps that verify and accept so many drafts of each request, [N, R]."""
    count, context = len(expected.limits), float(expected.context_lens.sum())
    rows, reading = count + kept.sum(axis=1), kept @ expected.context_lens
    seconds = COSTS.decoding(count, rows, context, reading) + expected.block_seconds
    return (count + gain.sum(axis=1)) / seconds


@given(st.integers(0, 2**32))
def test_given_alike_or_by_a_threshold(seed: int) -> None:
    expected, _, rng = made_up(seed)
    limits, _, min_survival, curves, _, _ = expected
    alike = np.array(sorted({K, *rng.integers(1, K + 1, 2).tolist()}))
    ragged_seconds = float(rng.choice([0.0, 0.002]))
    is_worth = (curves > np.maximum(min_survival, LEAST_WORTH)[:, None]) & (
        np.arange(K) < limits[:, None]
    )
    survive = (is_worth & (curves >= THRESHOLDS[:, None, None])).sum(axis=2)  # [T, R]
    lengths = np.concatenate([np.minimum(alike[:, None], limits), survive])
    gain = np.array([[c[:n].sum() for c, n in zip(curves, one, strict=True)] for one in lengths])
    kinds = [{*one.tolist()} for one in lengths]
    is_alike = [len(kind) == 1 and kind <= {0, *alike.tolist()} for kind in kinds]
    plain = rates_of(expected, lengths * 1.0, gain)
    tokens = len(limits) + gain.sum(axis=1)
    rates = tokens / (tokens / plain + ragged_seconds * ~np.array(is_alike))
    best, rate = best_lengths(COSTS.records, expected, alike, ragged_seconds, False)
    assert rate == pytest.approx(rates.max())
    assert best.tolist() in lengths[np.isclose(rates, rates.max())].tolist()


@given(st.integers(0, 2**32))
def test_a_block_or_the_text_that_promises_more(seed: int) -> None:
    _, forecast, rng = made_up(seed)
    summary, texts = forecast.summary, curves_of(rng, 6)
    scores = rng.uniform(0.0, 1.0, 6)
    curves, groups = expect_blocks(texts, scores, summary)
    for request, score in enumerate(scores):
        group = int((score < summary.min_scores[:-1]).sum())
        block = np.diff(summary.gain[group, 0], prepend=0.0)
        is_text = texts[request].sum() > block.sum()
        assert groups[request] == (-1 if is_text else group)
        assert curves[request] == pytest.approx(texts[request] if is_text else block)
