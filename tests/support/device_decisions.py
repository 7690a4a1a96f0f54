"""Make the device of a V2 engine decide what a test wants, directed by its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import LLM

from support.engines import proposer_of, scheduler_of
from vllm_dflash.planning import Ints
from vllm_dflash.planning.ahead import PlanAhead


def directed(llm: LLM, monkeypatch: pytest.MonkeyPatch, plan: Callable[[Ints], PlanAhead]) -> None:
    """Make `plan` plan each step from the most drafts that each request can use, [R]."""

    def planned(ids: Any, context_lens: Ints, limits: Ints, steps: int) -> PlanAhead:
        return plan(limits)

    monkeypatch.setattr(scheduler_of(llm).planner, "plan", planned)
    monkeypatch.setattr(scheduler_of(llm)._cadence, "is_due", lambda _: True)


def lengths_in_turn(*lengths: int) -> Callable[[Ints], PlanAhead]:
    """Return plans in turn, each with one length for all requests; length 0 runs no block."""
    left = iter(lengths * 10_000)

    def plan(limits: Ints) -> PlanAhead:
        length = next(left)
        return PlanAhead(np.minimum(limits, length), runs_block=length > 0)

    return plan


def prefer(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, text: float, block: float) -> None:
    """Make the device consider every draft of each kind to be that likely."""
    slots = proposer_of(llm).slots
    monkeypatch.setattr(type(slots), "set_rates", lambda *_: None)
    slots.rates[0], slots.rates[1] = block, text
    slots.records[:, 2:6] = 0.0
    slots.overall.zero_()
