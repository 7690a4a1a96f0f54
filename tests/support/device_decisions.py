"""Make the device of a V2 engine decide what a test wants, directed by its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from support.engines import proposer_of, scheduler_of
from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Plan


def directed(llm: LLM, monkeypatch: pytest.MonkeyPatch, plan: Callable[[Ints], Plan]) -> None:
    """Make `plan` plan each step from the most drafts that each request can use, [R]."""

    def planned(ids: Any, context_lens: Ints, limits: Ints, steps: int) -> Plan:
        return plan(limits)

    monkeypatch.setattr(scheduler_of(llm).planner, "plan", planned)
    monkeypatch.setattr(scheduler_of(llm)._cadence, "is_due", lambda _: True)


def drafting(lengths: Ints, *, runs_block: bool) -> Plan:
    """Return a plan of these lengths for each request, [R]."""
    return Plan(np.full(len(lengths), runs_block), int(runs_block), lengths)


def lengths_in_turn(*lengths: int) -> Callable[[Ints], Plan]:
    """Return plans in turn, each with one length for all requests; length 0 runs no block."""
    left = iter(lengths * 10_000)

    def plan(limits: Ints) -> Plan:
        length = next(left)
        return drafting(np.minimum(limits, length), runs_block=length > 0)

    return plan


def prefer(llm: LLM, *, text: float, block: float) -> None:
    """Make the device take a block's drafts to be as likely as `block` times their confidence, and
    a text's about as likely as `text`, until `DraftSlots.forget_all` is called."""
    slots = proposer_of(llm).slots
    slots.records[:, 2:6] = 0.0
    many = 1e30  # outcomes change nothing, as they fade
    wrong = 2.0 * (1.0 - text) if text else 1e3
    slots.overall.copy_(torch.tensor([[many, block * many], [many, wrong * many]]))
