"""Streams and events: which operations are ordered after which, and which are not ordered."""

from __future__ import annotations

import pytest
import torch

from emulated import torch_cuda
from emulated.torch_cuda import Schedule


@pytest.fixture
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def copied_on(stream: torch.cuda.Stream, x: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    with torch.cuda.stream(stream):
        host = x.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    return host, done


def test_a_stream_that_does_not_wait_reads_what_was_there_before(side: torch.cuda.Stream) -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.fill_(4)
    host, done = copied_on(side, x)
    done.synchronize()
    assert host.tolist() == [0, 0, 0, 0]


def test_a_stream_that_waits_reads_what_was_launched_before(side: torch.cuda.Stream) -> None:
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.fill_(4)
    side.wait_stream(torch.cuda.current_stream())
    x.fill_(5)  # after the wait, so the side stream does not wait for it
    host, done = copied_on(side, x)
    done.synchronize()
    assert host.tolist() == [4, 4, 4, 4]


def test_the_default_stream_waits_for_no_other(side: torch.cuda.Stream) -> None:
    """PyTorch's streams are made with cudaStreamNonBlocking."""
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.fill_(4)
    assert x.tolist() == [0, 0, 0, 0]
    side.synchronize()
    assert x.tolist() == [4, 4, 4, 4]


def test_an_event_stands_for_its_last_record(side: torch.cuda.Stream) -> None:
    x, event = torch.zeros(1, device="cuda"), torch.cuda.Event()
    event.record()
    x.fill_(1)
    event.record()
    x.fill_(2)
    side.wait_event(event)
    host, done = copied_on(side, x)
    done.synchronize()
    assert host.tolist() == [1]


def test_who_waits_for_an_event_waits_for_what_it_stood_for_then(side: torch.cuda.Stream) -> None:
    x, event = torch.zeros(1, device="cuda"), torch.cuda.Event()
    x.fill_(1)
    event.record()
    side.wait_event(event)
    x.fill_(2)
    event.record()  # too late for the side stream
    host, done = copied_on(side, x)
    done.synchronize()
    assert host.tolist() == [1]


def test_an_event_that_was_not_recorded_is_done(side: torch.cuda.Stream) -> None:
    event = torch.cuda.Event()
    assert event.query()
    event.synchronize()
    side.wait_event(event)
    side.synchronize()


def test_an_event_of_a_stream_is_not_reached_before_its_work() -> None:
    x, event = torch.zeros(2, device="cuda"), torch.cuda.Event()
    event.record()
    assert not event.query()
    while not event.query():  # repeated queries get there
        pass
    assert x.tolist() == [0, 0]


def test_times_between_events() -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    torch.ones(1000, device="cuda").sum()
    last.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0
    with pytest.raises(ValueError, match="must be recorded"):
        first.elapsed_time(torch.cuda.Event(enable_timing=True))


def overwritten_while_read(side: torch.cuda.Stream) -> float:
    """Return what a side stream reads when the main stream overwrites it without a wait."""
    x = torch.ones(1, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    host, done = copied_on(side, x)
    x.fill_(2)
    done.synchronize()
    return host.item()


def test_some_seed_shows_it_and_a_seed_stands_for_one_order() -> None:
    side = torch.cuda.Stream()

    def seen(seed: int) -> list[float]:
        torch_cuda.set_schedule(Schedule.RANDOM, seed=seed)
        found = [overwritten_while_read(side) for _ in range(20)]
        torch.cuda.synchronize()
        return found

    by_seed = [seen(seed) for seed in range(3)]
    assert {1, 2} <= {value for found in by_seed for value in found}
    assert [seen(seed) for seed in range(3)] == by_seed
