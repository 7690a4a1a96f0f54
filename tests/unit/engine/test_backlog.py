"""Context that waits: after catching up, the cache is as if every row had been stored at once."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.v1 import backlog as backlog_module
from vllm_dflash.engine.v1.backlog import ContextBacklog

WIDTH = 2


class Cache:
    """Stands for the context projection: remembers what was stored where."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, int]] = {}
        self.stores = 0

    def store(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.stores += 1
        for feature, position, slot in zip(
            features[:, 0].tolist(), positions.tolist(), slots.tolist(), strict=True
        ):
            self.rows[slot] = (feature, position)


def make(cache: Cache, capacity: int = 64, max_requests: int = 4) -> ContextBacklog:
    made = ContextBacklog(cache, WIDTH, torch.float32, max_requests)  # type: ignore[arg-type]
    made.capacity = capacity
    return made


def add(backlog: ContextBacklog, counts: list[int], first_slot: int) -> int:
    count = sum(counts)
    numbers = torch.arange(first_slot, first_slot + count)
    features = numbers.float()[:, None].repeat(1, WIDTH)
    return backlog.add(features, numbers, numbers, np.array(counts))


def test_rows_wait_until_their_request_is_drafted() -> None:
    cache = Cache()
    backlog = make(cache)
    backlog.update_batch(["a", "b"], {"a", "b"}, may_return=False)
    assert add(backlog, [3, 2], 0) == 0
    assert add(backlog, [1, 1], 10) == 0
    assert backlog.pending().tolist() == [4, 3]
    assert not cache.rows
    assert backlog.store(np.array([True, False])) == 4
    assert sorted(cache.rows) == [0, 1, 2, 10]
    assert cache.rows[2] == (2.0, 2)
    assert cache.stores == 1
    assert backlog.pending().tolist() == [0, 3]
    assert backlog.store(np.array([True, False])) == 0
    assert cache.stores == 1


def test_what_becomes_of_rows_when_a_request_leaves() -> None:
    """Ended undrafted: dropped. Ended, but to be found by its prefix, or preempted: stored."""
    for name, may_return, drafted, stored in (
        ("ended", True, False, False),
        ("ended", False, True, False),
        ("ended", True, True, True),
        ("preempted", False, False, True),
    ):
        cache = Cache()
        backlog = make(cache)
        backlog.update_batch([name, "other"], {name, "other"}, may_return=may_return)
        if drafted:
            backlog.store(np.array([True, False]))
        add(backlog, [3, 1], 0)
        count = backlog.update_batch(["other"], {"other", "preempted"}, may_return=may_return)
        assert count == (3 if stored else 0), (name, may_return, drafted)
        assert sorted(cache.rows) == ([0, 1, 2] if stored else [])
        assert backlog.pending().tolist() == [1]


def test_a_new_request_of_an_old_name_has_no_past() -> None:
    cache = Cache()
    backlog = make(cache)
    backlog.update_batch(["a"], {"a"}, may_return=True)
    backlog.store(np.array([True]))
    backlog.update_batch([], set(), may_return=True)
    backlog.update_batch(["a"], {"a"}, may_return=True)
    add(backlog, [2], 0)
    assert backlog.update_batch([], set(), may_return=True) == 0


def test_the_oldest_rows_make_room() -> None:
    cache = Cache()
    backlog = make(cache, capacity=8)
    backlog.update_batch(["a"], {"a"}, may_return=False)
    assert [add(backlog, [2], first) for first in (0, 2, 4, 6)] == [0, 0, 0, 0]
    assert add(backlog, [2], 8) == 2
    assert sorted(cache.rows) == [0, 1]
    assert add(backlog, [3], 20) == 3  # more than a quarter of the room: stored at once
    assert backlog.pending().tolist() == [8]


def test_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES", 1000)
    assert ContextBacklog(None, 10, torch.bfloat16, 4).capacity == 50  # type: ignore[arg-type]
    assert ContextBacklog(None, 1, torch.bfloat16, 4).capacity == 500  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcde"), min_size=1, max_size=3),
            st.lists(st.integers(1, 4), min_size=3, max_size=3),
            st.lists(st.booleans(), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_drafted_request_finds_all_its_context(steps: list) -> None:
    """Whatever came and went in between, and however small the ring."""
    cache = Cache()
    backlog = make(cache, capacity=16, max_requests=3)
    expected: dict[str, dict[int, tuple[float, int]]] = {}
    slot = 0
    for members, counts, choices in steps:
        batch = sorted(members)
        backlog.update_batch(batch, set("abcde"), may_return=False)
        for name, count in zip(batch, counts, strict=False):
            for here in range(slot, slot + count):
                expected.setdefault(name, {})[here] = (float(here), here)
            slot += count
        add(backlog, counts[: len(batch)], slot - sum(counts[: len(batch)]))
        drafted = np.array(choices[: len(batch)])
        backlog.store(drafted)
        for name, chosen in zip(batch, drafted, strict=True):
            if chosen:
                assert expected.get(name, {}).items() <= cache.rows.items()


def test_requests_that_are_computed_again_bring_nothing_of_before() -> None:
    """Thrown out and resumed between two steps, in a batch that looks the same."""
    cache = Cache()
    backlog = make(cache)
    backlog.update_batch(["a", "b"], {"a", "b"}, may_return=True)
    backlog.store(np.array([True, True]))
    add(backlog, [3, 2], 0)
    backlog.forget({"a", "never seen"})
    assert backlog.update_batch(["a", "b"], {"a", "b"}, may_return=True) == 0
    add(backlog, [4, 1], 20)
    assert backlog.pending().tolist() == [4, 3]
    backlog.store(np.array([True, True]))
    assert sorted(cache.rows) == [3, 4, 20, 21, 22, 23, 24]
