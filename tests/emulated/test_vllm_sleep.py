"""Sleeping memory: weights come back at the same addresses; the engine's other memory is lost."""

from __future__ import annotations

import pytest
import torch

from emulated import torch_cuda
from emulated.vllm_sleep import SleepingMemory


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_what_was_allocated_under_a_tag_is_lost_or_comes_back(keeps_weights: bool) -> None:
    memory = SleepingMemory()
    with memory.use_memory_pool("weights"):
        weights = torch.full((1000,), 2.0, device="cuda")
        with memory.use_memory_pool("kv_cache"):
            cache = torch.full((1000,), 3.0, device="cuda")
        more = torch.full((10,), 4.0, device="cuda")
    other = torch.full((1000,), 5.0, device="cuda")
    places = [tensor.data_ptr() for tensor in (weights, cache, more)]
    memory.sleep(("weights",) if keeps_weights else ())
    assert all(tensor.isnan().all() for tensor in (weights, cache, more))
    memory.wake_up(["weights"])
    memory.wake_up(["kv_cache"])
    assert (weights == 2.0).all() == (more == 4.0).all() == keeps_weights
    assert cache.isnan().all()
    assert (other == 5.0).all()
    assert [tensor.data_ptr() for tensor in (weights, cache, more)] == places


def test_what_is_freed_has_no_tag() -> None:
    memory = SleepingMemory()
    before = memory.get_current_usage()
    with memory.use_memory_pool("weights"):
        weights = torch.zeros(1000, device="cuda")
    assert memory.get_current_usage() - before == 4096
    del weights
    assert memory.get_current_usage() == before
    torch.zeros(1000, device="cuda")
    assert memory.get_current_usage() == before
    assert torch_cuda.device().blocks("") == []
