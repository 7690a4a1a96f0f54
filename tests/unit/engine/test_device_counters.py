"""Sums on the device of what became of drafts."""

import numpy as np
import pytest
import torch

from vllm_dflash.engine.v2.device_counters import DeviceCounters


@pytest.fixture
def counters() -> DeviceCounters:
    return DeviceCounters(torch.device("cpu"))


def test_nothing_yet(counters: DeviceCounters) -> None:
    assert (counters.verifications(), counters.nan_drafts()) == ((0, 0, 0), 0)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([True] * 5, (3, 14, 5)),
        ([False, True, True, True, True], (2, 7, 2)),
        ([True, True, True, True, False], (2, 11, 5)),
        ([False] * 5, (0, 0, 0)),
    ],
)
def test_blocks_drafts_and_accepted_ones(
    counters: DeviceCounters, own: list[bool], expected: tuple[int, int, int]
) -> None:
    """All sorts: partly accepted, all accepted, undrafted, in its prompt, all rejected."""
    sampled = torch.tensor([4, 3, 1, 0, 1], dtype=torch.int32)
    rejected = torch.tensor([4, 2, 0, 0, 3], dtype=torch.int32)
    for _ in range(3):
        counters.observe_verification(sampled, rejected, np.array(own))
    assert counters.verifications() == tuple(3 * number for number in expected)


def test_clearing_keeps_the_memory_that_graphs_count_in(counters: DeviceCounters) -> None:
    one, nan = torch.tensor([2]), torch.tensor([float("nan")])
    before = [buffer.data_ptr() for buffer in vars(counters).values()]
    counters.observe_verification(one, one, np.array([True]))
    counters.observe_logits(nan, torch.tensor([True]))
    counters.clear()
    assert (counters.verifications(), counters.nan_drafts()) == ((0, 0, 0), 0)
    assert [buffer.data_ptr() for buffer in vars(counters).values()] == before


def test_logits_that_are_not_finite(counters: DeviceCounters) -> None:
    """Rows that are no drafts (bonus rows, padding) may hold anything."""
    best = torch.tensor([float("nan"), 1.0, float("inf"), float("nan"), -float("inf")])
    for _ in range(2):
        counters.observe_logits(best, torch.tensor([True, True, True, False, True]))
    assert counters.nan_drafts() == 6
    assert counters.verifications() == (0, 0, 0)
