"""The soak's arithmetic and verdicts."""

from __future__ import annotations

import asyncio
import math
import random

import httpx
import numpy as np
import pytest

from soak.behaviours import BEHAVIOURS, Client, Outcome
from soak.checks import (
    MEBIBYTE,
    Limits,
    check_answers,
    check_end,
    check_growth,
    check_idle,
    check_outcomes,
    check_speed,
    first_and_last_third,
    memory_growth,
    rates,
    slope_per_minute,
)
from soak.clients import Tally
from soak.soaked_server import read_metrics

LIMITS = Limits(growth=2.0, slowdown=1.3, shutdown=30.0)


def test_slope_of_a_line_with_noise() -> None:
    rng = np.random.default_rng(0)
    seconds = np.sort(rng.uniform(0, 600, 300))
    values = 700 + 5 * seconds / 60 + rng.normal(0, 1, 300)
    assert slope_per_minute(seconds, values) == pytest.approx(5, abs=0.1)
    assert slope_per_minute([0, 60], [3, 2]) == pytest.approx(-1)
    with pytest.raises(ValueError, match="two different times"):
        slope_per_minute([5, 5], [1, 2])


def test_growth_is_of_the_second_half_only() -> None:
    """What is filled at first is no leak; what goes on is."""
    seconds = np.arange(0, 600, 2.0)
    filled = np.minimum(seconds, 250) * MEBIBYTE
    assert memory_growth(seconds, filled) == pytest.approx(0)
    assert check_growth(0.0, LIMITS).held
    assert memory_growth(seconds, filled + seconds / 20 * MEBIBYTE) == pytest.approx(3)
    assert not check_growth(3.0, LIMITS).held


def test_thirds_and_rates() -> None:
    seconds = [10.0, 15.0, 35.0, 50.0, 55.0, 60.0]
    assert first_and_last_third(seconds, [1, 3, 99, 4, 5, 6], 0, 60) == (2, 5)
    assert math.isnan(first_and_last_third([35.0], [1], 0, 60)[0])
    assert rates([0, 2, 3], [10, 30, 30]) == [10, 0]


@pytest.mark.parametrize(
    ("latencies", "throughputs", "held"),
    [
        ((0.01, 0.012), (700, 600), [True, True]),
        ((0.01, 0.014), (700, 600), [False, True]),
        ((0.01, 0.012), (700, 500), [True, False]),
        ((0.01, 0.01), (700, 0.0), [True, False]),
        ((math.nan, 0.01), (700, math.nan), [False, False]),
    ],
)
def test_speed(latencies: tuple, throughputs: tuple, held: list[bool]) -> None:
    assert [check.held for check in check_speed(latencies, throughputs, LIMITS)] == held


def test_without_a_limit_nothing_need_be_measured() -> None:
    """As in a short soak, whose first third may bring no token."""
    unlimited = Limits(growth=2.0, slowdown=math.inf, shutdown=30.0)
    speed = check_speed((math.nan, 0.01), (0.0, 300.0), unlimited)
    assert [check.held for check in speed] == [True, True]


def test_what_must_not_be_is_found() -> None:
    assert check_idle({"running": 0.0, "kv_cache": 0.0}).held
    assert not check_idle({"running": 0.0, "kv_cache": 0.01}).held
    assert check_answers("a", ["a", "a"]).held
    assert not check_answers("a", ["a", "b"]).held
    assert not check_answers("", [""]).held
    assert not check_answers("a", []).held
    assert [check.held for check in check_end(3.0, 0, 0, False, LIMITS)] == [True] * 3
    assert [check.held for check in check_end(31.0, 0, 1, True, LIMITS)] == [False] * 3
    assert not check_end(None, -9, 0, False, LIMITS)[1].held
    assert not check_end(3.0, 1, 0, False, LIMITS)[1].held
    assert [c.held for c in check_outcomes({"a": {"200": 1}, "b": {}}, [])] == [False, True]
    assert [c.held for c in check_outcomes({"a": {"500": 1}}, ["a: 500"])] == [True, False]


def test_a_tally_knows_whose_error_it_is() -> None:
    tally, behaviours = Tally(), {behaviour.name: behaviour for behaviour in BEHAVIOURS}
    tally.add(behaviours["malformed JSON"], Outcome(400))
    tally.add(behaviours["stream"], Outcome(200, gaps=[0.1, 0.3]))
    assert not tally.faults
    assert tally.gaps == [pytest.approx(0.2)]
    tally.add(behaviours["completion"], Outcome(400, "why"))
    tally.add(behaviours["malformed JSON"], Outcome(500))
    tally.fail(behaviours["chat"], httpx.ReadError("gone"))
    assert tally.faults == ["completion: 400 why", "malformed JSON: 500 ", "chat: ReadError gone"]
    assert tally.total == 5


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (['data: {"choices": []}', "data: [DONE]"], 200),
        (['data: {"choices": []}'], 500),  # cut off
        (['data: {"error": {"message": "dead"}}', "data: [DONE]"], 500),
    ],
)
def test_a_stream_that_ends_badly_is_an_error(lines: list[str], status: int) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="\n\n".join(lines) + "\n\n")

    async def outcome() -> Outcome:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await Client(http, ["prompt"], 512, random.Random(0)).stream()

    assert asyncio.run(outcome()).status == status


def test_metrics_are_summed_over_labels() -> None:
    text = (
        '# HELP\nvllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 2e-05\n'
    )
    metrics = read_metrics(text)
    assert metrics["running"] == 3
    assert metrics["kv_cache"] == 2e-05
    assert metrics["waiting"] == 0
