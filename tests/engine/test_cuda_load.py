"""Host and device drift apart under load: copies between them must not be read too early.

On a CPU a copy is done when it is asked for, so such errors do not show there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from vllm import LLM

from support.cuda_engines import GRAPHS, IS_EMULATED, NEW_TOKENS, ON_CUDA, PROMPTS, SLOW_EMULATED
from support.engines import DFLASH, FIXED, engine, fix_costs, greedy, runner_of, token_ids

pytestmark = [*ON_CUDA, *SLOW_EMULATED]  # schedules of the emulated GPU lag behind by themselves
CYCLES = 4_000_000
"""Ticks of the GPU's clock: two milliseconds, several times a step of the demo pair."""
NUMBERS = 16 * 2**20
"""Numbers in a copy that keeps the copy engines busy: 64 MiB, milliseconds."""


@pytest.fixture(autouse=True)
def _no_costs_of_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the costs: with an emulated GPU's own, the planner would rightly draft nothing."""
    if IS_EMULATED:
        fix_costs(monkeypatch)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with engine(**GRAPHS) as llm:
        return token_ids(llm, PROMPTS, greedy(NEW_TOKENS))


def late_device() -> Callable[[], None]:
    """Delay the next launch by milliseconds, until long after the host has gone on."""
    return lambda: torch.cuda._sleep(CYCLES)


def busy_copies() -> Callable[[], None]:
    """Make our copies wait for others, in both directions."""
    stream = torch.cuda.Stream()
    host = [torch.zeros(NUMBERS, pin_memory=True) for _ in range(2)]
    device = torch.zeros(NUMBERS, device="cuda")

    def copy() -> None:
        with torch.cuda.stream(stream):
            device.copy_(host[0], non_blocking=True)
            host[1].copy_(device, non_blocking=True)

    return copy


def before_each(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, names: tuple[str, ...], act: Callable[[], None]
) -> None:
    """Call `act` before these methods of the model runner."""
    runner = runner_of(llm)

    def late(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        act()
        return original(*args, **named)

    for name in names:
        monkeypatch.setattr(runner, name, partial(late, getattr(runner, name)))


def outcomes(llm: LLM) -> tuple[list[list[int]], dict[str, Any]]:
    tokens = token_ids(llm, PROMPTS, greedy(NEW_TOKENS))
    (stats,) = llm.collective_rpc("dflash_stats")
    return tokens, stats


@pytest.mark.parametrize("disturbance", [late_device, busy_copies])
@pytest.mark.parametrize("names", [("execute_model",), ("sample_tokens",)], ids=" ".join)
def test_a_device_that_lags_behind_changes_nothing(
    plain: list[list[int]],
    disturbance: Callable[[], Callable[[], None]],
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts and counts stay the same: as many drafts are accepted as without the lag.

    Unused drafts of a last step are counted with the next steps, so the first round is left out.
    """
    settings: dict[str, Any] = {**GRAPHS, "enforce_eager": True, "enable_prefix_caching": False}
    with engine(speculative_config=dict(FIXED), async_scheduling=True, **settings) as llm:
        tokens, first = outcomes(llm)
        assert tokens == plain
        _, second = outcomes(llm)
        before_each(monkeypatch, llm, names, disturbance())
        tokens, third = outcomes(llm)
    assert tokens == plain
    for name in ("accepted_tokens", "draft_tokens"):
        assert third[name] - second[name] == second[name] - first[name] > 0, name
    assert third["nan_drafts"] == 0


def test_planned_lengths_on_a_device_that_lags_behind(
    plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs read buffers that the host meanwhile writes for the next step."""
    with engine(speculative_config=dict(DFLASH), async_scheduling=True, **GRAPHS) as llm:
        before_each(monkeypatch, llm, ("execute_model", "sample_tokens"), late_device())
        tokens, stats = outcomes(llm)
    assert tokens == plain
    assert stats["accepted_tokens"] > 0
    assert stats["captures_after_warmup"] == stats["reallocations_after_warmup"] == 0
