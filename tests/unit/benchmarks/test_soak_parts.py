"""The soak's arithmetic and verdicts."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import sys
from pathlib import Path

import httpx
import pytest

from soak import soak_command, soaked_server
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
)
from soak.clients import Tally
from soak.soaked_server import SoakServer, read_metrics

LIMITS = Limits(growth=2.0, slowdown=1.3, shutdown=30.0)


def test_growth_is_of_the_second_half_only() -> None:
    """What is filled at first is no leak; what goes on is."""
    seconds = [2.0 * number for number in range(300)]
    filled = [min(one, 250) * MEBIBYTE for one in seconds]
    assert memory_growth(seconds, filled) == pytest.approx(0)
    assert check_growth(0.0, LIMITS).held
    leaking = [some + one / 20 * MEBIBYTE for some, one in zip(filled, seconds, strict=True)]
    assert memory_growth(seconds, leaking) == pytest.approx(3)
    assert not check_growth(3.0, LIMITS).held
    with pytest.raises(ValueError, match="two data points"):
        memory_growth([5.0], [1.0])


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


def test_a_server_whose_start_is_interrupted_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a session of its own, which a Ctrl-C does not reach."""

    def interrupt(url: str) -> None:
        raise KeyboardInterrupt

    (tmp_path / "vllm").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "vllm").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr(httpx, "get", interrupt)
    monkeypatch.setattr(soaked_server, "END_S", 0.2)
    server = SoakServer([], tmp_path / "log", {})
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.process is not None
    assert server.process.poll() is not None


@pytest.mark.usefixtures("sigterm_ignored")
def test_a_time_limit_ends_a_soak_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak"])
    monkeypatch.setattr(soak_command, "soak", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        soak_command.main()
