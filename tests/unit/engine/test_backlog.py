"""Context that waits: after catching up, the cache is as if every row had been stored at once."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.v1 import backlog as backlog_module
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.waiting_rows import WaitingRows

WIDTH = 2
BLOCK = 4
NUM_BLOCKS = 32


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


def make(cache: Cache, capacity: int = 64) -> ContextBacklog:
    made = ContextBacklog(
        cache,  # type: ignore[arg-type]
        WIDTH,
        torch.float32,
        num_slots=NUM_BLOCKS * BLOCK,
        block_size=BLOCK,
    )
    made.rows = WaitingRows(capacity, NUM_BLOCKS * BLOCK, BLOCK)
    return made


POSITIONS, SLOTS = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
"""Buffers that every step fills anew, as the model runner's are."""


def add(backlog: ContextBacklog, slots: list[int], feature: float = 0.0) -> int:
    """Rows for these slots; a row's position is its slot plus 100."""
    count = len(slots)
    SLOTS[:count] = torch.tensor(slots)
    POSITIONS[:count] = SLOTS[:count] + 100
    features = torch.full((count, WIDTH), feature)
    return backlog.add(features, POSITIONS[:count], SLOTS[:count])


def table(*requests: list[int]) -> np.ndarray:
    """Block table of these requests, filled up with blocks that are not theirs."""
    width = max(map(len, requests))
    return np.array([blocks + [31] * (width - len(blocks)) for blocks in requests])


def test_rows_wait_until_a_request_that_has_their_block_is_drafted() -> None:
    cache = Cache()
    backlog = make(cache)
    assert add(backlog, [4, 5, 6, 7, 8], 1.0) == 0  # blocks 1 and 2
    assert add(backlog, [20, 9], 2.0) == 0  # blocks 5 and 2
    blocks, lens = table([1, 2], [5]), np.array([6, 1])
    assert backlog.count(blocks, lens).tolist() == [6, 1]
    assert not cache.rows
    assert backlog.store(blocks[:1], lens[:1]) == 6
    assert cache.rows == {slot: (2.0 if slot == 9 else 1.0, slot + 100) for slot in range(4, 10)}
    assert cache.stores == 1
    assert backlog.count(blocks, lens).tolist() == [0, 1]
    assert backlog.store(blocks[:1], lens[:1]) == 0
    assert cache.stores == 1


def test_a_shared_block_counts_for_each_and_is_stored_once() -> None:
    cache = Cache()
    backlog = make(cache)
    add(backlog, [4, 5, 6, 7, 8, 12])
    blocks, lens = table([1, 2], [1, 3]), np.array([5, 5])
    assert backlog.count(blocks, lens).tolist() == [5, 5]
    assert backlog.store(blocks, lens) == 6
    assert sorted(cache.rows) == [4, 5, 6, 7, 8, 12]


def test_only_blocks_of_the_context_count() -> None:
    """A block table holds what was given for drafts, and anything behind it."""
    backlog = make(Cache())
    add(backlog, [4, 8, 12])
    assert backlog.count(table([1, 2, 3]), np.array([4])).tolist() == [1]
    assert backlog.count(table([1, 2, 3]), np.array([5])).tolist() == [2]
    assert backlog.count(table([1, 2, 3]), np.array([0])).tolist() == [0]


def test_rows_of_blocks_with_a_new_owner_are_dropped() -> None:
    """Also before they were put into the ring, and where the owner's blocks are larger."""
    cache = Cache()
    backlog = make(cache)
    add(backlog, [4, 5, 8, 16])
    backlog.drop([], BLOCK)
    backlog.drop([1], BLOCK)
    assert backlog.count(table([1, 2, 4]), np.array([12])).tolist() == [2]
    backlog.drop([1], 2 * BLOCK)  # slots 8 to 15
    assert backlog.count(table([1, 2, 4]), np.array([12])).tolist() == [1]
    add(backlog, [4, 5], 7.0)
    backlog.store(table([1, 2, 4]), np.array([12]))
    assert cache.rows == {4: (7.0, 104), 5: (7.0, 105), 16: (0.0, 116)}


def test_a_slot_has_one_row_the_newest() -> None:
    cache = Cache()
    backlog = make(cache)
    add(backlog, [4, 5], 1.0)
    add(backlog, [5, 6], 2.0)
    assert backlog.store(table([1]), np.array([4])) == 3
    assert cache.rows == {4: (1.0, 104), 5: (2.0, 105), 6: (2.0, 106)}


def test_the_oldest_rows_make_space() -> None:
    cache = Cache()
    backlog = make(cache, capacity=8)
    assert [add(backlog, [first, first + 1]) for first in (0, 2, 4, 6)] == [0, 0, 0, 0]
    assert add(backlog, [8, 9]) == 2
    assert sorted(cache.rows) == [0, 1]
    backlog.drop([0], BLOCK)  # 2 and 3: the next in turn
    assert add(backlog, [10, 11]) == 0
    assert add(backlog, [20, 21, 22]) == 3  # more than a quarter of the ring: stored at once
    assert sorted(cache.rows) == [0, 1, 20, 21, 22]


def test_a_full_ring_stores_many_rows_at_a_time() -> None:
    cache = Cache()
    backlog = make(cache, capacity=64)  # looks a quarter ahead
    stored = [add(backlog, [slot]) for slot in range(64)]
    assert not any(stored)
    stored = [add(backlog, [64 + slot]) for slot in range(32)]
    assert stored == [16, *[0] * 15, 16, *[0] * 15]


def test_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES", 1000)

    def capacity(width: int) -> int:
        made = ContextBacklog(None, width, torch.bfloat16, num_slots=8, block_size=4)  # type: ignore[arg-type]
        return made.rows.capacity

    assert (capacity(10), capacity(1)) == (50, 500)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What happens to blocks: rows are added to some, some change hands, some are drafted."""
    blocks = st.integers(0, 7)
    steps = draw(
        st.lists(
            st.one_of(
                st.tuples(
                    st.just("add"), st.sets(st.integers(0, 8 * BLOCK - 1), min_size=1, max_size=5)
                ),
                st.tuples(st.just("drop"), st.lists(blocks, max_size=4)),  # given back and taken
                st.tuples(st.just("store"), st.sets(blocks, min_size=1, max_size=3)),
            ),
            max_size=30,
        )
    )
    return [(what, sorted(which)) for what, which in steps]


@given(histories(), st.sampled_from([6, 16, 64]))
def test_whoever_is_drafted_finds_the_newest_context_of_its_blocks(
    history: list[tuple[str, list[int]]], capacity: int
) -> None:
    """Against dictionaries, however small the ring."""
    cache = Cache()
    backlog = make(cache, capacity)
    newest: dict[int, tuple[float, int]] = {}  # of every slot since its block changed hands
    for number, (what, which) in enumerate(history):
        if what == "add":
            add(backlog, which, float(number))
            newest |= {slot: (float(number), slot + 100) for slot in which}
        elif what == "drop":
            backlog.drop(which, BLOCK)
            for slot in [slot for slot in newest if slot // BLOCK in which]:
                del newest[slot]
                cache.rows.pop(slot, None)
        else:
            full = np.array([len(which) * BLOCK])
            due = backlog.count(np.array([which]), full)[0]
            assert backlog.store(np.array([which]), full) == due
            for slot in [slot for slot in newest if slot // BLOCK in which]:
                assert cache.rows[slot] == newest[slot]
        # What was stored is never older than what a block's owner added, and never another's.
        assert all(cache.rows[slot][0] <= newest[slot][0] for slot in cache.rows)
        assert len(backlog.rows) <= min(capacity, 8 * BLOCK)
