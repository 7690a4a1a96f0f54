"""Ranks go by rank 0: what is sent arrives as it was, and nothing is sent where there is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dflash.engine import agreement
from vllm_dflash.engine.agreement import (
    agreed_by_all,
    agreed_lengths,
    agreed_plan,
    agreed_seconds,
)
from vllm_dflash.planning.step import Plan


class Ranks:
    """A group whose rank 0 has sent something before the others ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_first = True
        group = SimpleNamespace(world_size=world_size, ranks=[4, 5], cpu_group="by way of the host")

        def broadcast(values: torch.Tensor, src: int, group: Any) -> None:
            assert (src, group) == (4, "by way of the host")
            if self.is_first:
                self.sent.append(values.clone())
            else:
                values.copy_(self.sent.pop(0))

        monkeypatch.setattr(agreement, "get_tp_group", lambda: group)
        monkeypatch.setattr(torch.distributed, "broadcast", broadcast)


PLAN = Plan(np.array([True, False, True]), 5, 1 / 3, 1.25, is_probe=True, least=2, skip_steps=7)
OTHER = Plan(np.array([False, True, True]), 3, 0.5, 2.0)
FREE = Plan.nothing(3, 1 / 3, 7, speedup=1.25, uses_text=True)


def test_a_plan_arrives_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    for plan, other in ((PLAN, OTHER), (OTHER, PLAN), (FREE, PLAN), (PLAN, FREE)):
        ranks.is_first = True
        on_first = agreed_plan(plan)
        ranks.is_first = False
        for got in (on_first, agreed_plan(other)):
            assert {name: repr(value) for name, value in vars(got).items()} == {
                name: repr(value) for name, value in vars(plan).items()
            }


def test_lengths_and_seconds_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)
    lengths, from_text = np.array([3, 0, 7], dtype=np.int32), np.array([True, False, False])
    on_first = agreed_lengths(lengths, from_text)
    agreed_seconds(1 / 3)
    ranks.is_first = False
    other = agreed_lengths(np.array([1, 1, 1]), np.array([False, True, False]))
    for agreed in (on_first, other):
        assert [values.tolist() for values in agreed] == [[3, 0, 7], [True, False, False]]
        assert [values.dtype for values in agreed] == [np.int64, np.bool_]
    assert agreed_seconds(5.0) == 1 / 3
    assert ranks.sent == []


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 1)
    lengths, from_text = np.array([3, 0]), np.array([True, False])
    assert agreed_plan(PLAN) is PLAN
    agreed = agreed_lengths(lengths, from_text)
    assert agreed[0] is lengths
    assert agreed[1] is from_text
    assert agreed_seconds(0.25) == 0.25
    assert ranks.sent == []


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("holds", [True, False])
def test_what_does_not_hold_on_one_rank_holds_on_none(
    monkeypatch: pytest.MonkeyPatch, holds: bool, others: int
) -> None:
    group = SimpleNamespace(world_size=2, cpu_group="by way of the host")

    def all_reduce(votes: torch.Tensor, how: Any, group: Any) -> None:
        assert how == torch.distributed.ReduceOp.MIN
        assert group == "by way of the host"
        votes.clamp_(max=others)

    monkeypatch.setattr(agreement, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    assert agreed_by_all(holds) is (holds and bool(others))
    group.world_size = 1
    assert agreed_by_all(holds) is holds
