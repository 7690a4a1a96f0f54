"""Memory: reused as by PyTorch's caching allocator, and full of rubbish until written."""

from __future__ import annotations

import pytest
import torch

from emulated import torch_cuda
from emulated.torch_cuda import Schedule

SIZE = 1000


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    """Prevent the reuse of memory that other tests have freed."""
    torch.cuda.empty_cache()


def full(value: float) -> torch.Tensor:
    return torch.full((SIZE,), value, device="cuda")


def test_fresh_memory_holds_rubbish() -> None:
    assert torch.empty(3, 5, device="cuda").isnan().all()
    assert torch.empty(4, pin_memory=True).isnan().all()


@pytest.mark.parametrize("is_freed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rubbish_is_nan(dtype: torch.dtype, is_freed: bool) -> None:
    x = torch.ones(SIZE, dtype=dtype, device="cuda")
    if is_freed:
        del x
    assert torch.empty(SIZE, dtype=dtype, device="cuda").isnan().all()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_rubbish_is_no_index_and_no_padding(dtype: torch.dtype) -> None:
    assert (torch.empty(SIZE, dtype=dtype, device="cuda") < -1).all()


def read_on_another_stream(*, records: bool) -> float:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    torch_cuda.set_schedule(Schedule.SOME_AHEAD, (main.stream_id,))
    x = full(3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        host = x.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    if records:
        x.record_stream(side)
    del x  # and the main stream continues
    others = [full(7) for _ in range(3)]
    done.synchronize()
    assert len(others) == 3
    return host[-1].item()


def test_a_stream_that_was_not_recorded_reads_what_is_not_its_own() -> None:
    assert read_on_another_stream(records=False) == 7


def test_a_stream_that_was_recorded_is_waited_for() -> None:
    assert read_on_another_stream(records=True) == 3
