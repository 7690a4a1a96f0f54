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


def test_freed_memory_is_given_out_again_to_its_stream() -> None:
    first = full(1)
    address = first.data_ptr()
    del first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert full(2).data_ptr() != address
    assert full(3).data_ptr() == address


def test_who_gets_it_next_comes_behind_who_had_it() -> None:
    first = full(1)
    total = first.sum()
    del first
    second = full(2)
    assert total.item() == SIZE
    assert second.sum().item() == 2 * SIZE


def test_freed_contents_are_lost_in_the_order_of_the_stream() -> None:
    first = full(1)
    weak = torch.ops._C.weak_ref_tensor(first)
    before = weak.clone()
    del first
    after = weak.clone()
    assert before[0].item() == 1
    assert after[0].item() != 1


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


def test_recorded_memory_comes_back_when_its_readers_are_done() -> None:
    side, x = torch.cuda.Stream(), full(1)
    address = x.data_ptr()
    with torch.cuda.stream(side):
        x.sum()
    x.record_stream(side)
    del x
    others = [full(2)]
    assert others[0].data_ptr() != address
    side.synchronize()
    assert full(3).data_ptr() == address


def test_the_second_time_nothing_is_taken_from_the_device() -> None:
    def work() -> float:
        x = full(1)
        return sum((x * n).sum().item() for n in range(4))

    work()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    work()
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    segment = 1 << 21
    kept = [torch.empty(segment // 8, dtype=torch.uint8, device="cuda") for _ in range(16)]
    assert torch.cuda.memory_stats()["num_device_alloc"] == before + 2
    assert len(kept) == 16


def test_memory_is_counted() -> None:
    torch.cuda.empty_cache()
    used, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    torch.cuda.reset_peak_memory_stats()
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == used + (1 << 20)
    assert torch.cuda.mem_get_info() == (free - (1 << 20), total)
    del x
    assert torch.cuda.memory_allocated() == used
    assert torch.cuda.max_memory_allocated() == used + (1 << 20)
    assert torch.cuda.memory_reserved() == reserved + (1 << 20)
    assert torch.accelerator.memory_reserved() == reserved + (1 << 20)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved


def test_there_is_an_end_to_it() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    x = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free, dtype=torch.uint8, device="cuda")
    del x  # cached for the next, and released if that has another size
    big = torch.empty(free - (1 << 20), dtype=torch.uint8, device="cuda")
    assert big.numel() < total
    del big
    torch.cuda.empty_cache()
