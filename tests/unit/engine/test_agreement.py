"""All ranks come to one answer, and a single rank sends nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_dflash.engine import agreement
from vllm_dflash.engine.agreement import agreed_by_all, from_rank_0


def test_all_get_what_rank_0_has(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    group = SimpleNamespace(world_size=2, ranks=[4, 5], cpu_group="by way of the host")

    def broadcast(values: list[Any], src: int, group: Any) -> None:
        assert (src, group) == (4, "by way of the host")
        if sent:
            values[0] = sent.pop()
        else:
            sent.append(values[0])

    monkeypatch.setattr(agreement, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    assert [from_rank_0("mine"), from_rank_0("another's")] == ["mine", "mine"]
    group.world_size = 1
    assert from_rank_0("alone") == "alone"
    assert sent == []


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
