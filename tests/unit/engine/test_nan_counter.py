"""Drafts that are not finite, counted on the device."""

import pytest
import torch

from vllm_dflash.engine.v2.nan_counter import NanCounter

CONFIDENCE = torch.tensor([0.0, 1e-6, 0.0, 0.0, 0.0])
IS_DRAFTED = torch.tensor([True, True, True, False, True])


@pytest.fixture
def counter() -> NanCounter:
    return NanCounter(torch.device("cpu"))


def test_rows_that_are_no_drafts_may_hold_anything(counter: NanCounter) -> None:
    """Bonus rows, and padding."""
    assert counter.total() == 0
    for _ in range(2):
        counter.observe(CONFIDENCE, IS_DRAFTED)
    assert counter.total() == 6


def test_what_needs_no_waiting_is_as_old_as_the_last_look(counter: NanCounter) -> None:
    counter.observe(CONFIDENCE, IS_DRAFTED)
    assert counter.lately() == 0
    counter.observe(CONFIDENCE, IS_DRAFTED)
    assert counter.lately() == 3
    assert counter.lately() == 6


def test_clearing_keeps_the_memory_that_graphs_count_in(counter: NanCounter) -> None:
    place = counter._count.gpu.data_ptr()
    counter.observe(CONFIDENCE, IS_DRAFTED)
    counter.lately()
    counter.clear()
    assert (counter.total(), counter.lately()) == (0, 0)
    assert counter._count.gpu.data_ptr() == place
