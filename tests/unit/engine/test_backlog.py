"""Context that waits: after catching up, the cache is as if every row had been stored at once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.context_rows import waiting_row
from vllm_dflash.engine.v1 import backlog as backlog_module
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.warm import tensors_of

WIDTH = 2
BLOCK = 4
NUM_BLOCKS = 32
Rows = dict[int, tuple[list[float], int]]
"""Features and position of each slot."""


class Cache:
    """Replaces the context projection; remembers what was stored where."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.count = 0

    def store(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        rows = zip(slots.tolist(), features.tolist(), positions.tolist(), strict=True)
        self.count += len(slots)
        self.rows |= {slot: (of_row, position) for slot, of_row, position in rows}


def make(cache: Cache, capacity: int = 64) -> ContextBacklog:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backlog_module, "MAX_ROWS", capacity)
        return ContextBacklog(
            cache,  # type: ignore[arg-type]
            WIDTH,
            torch.float32,
            num_slots=NUM_BLOCKS * BLOCK,
            page_size=BLOCK,
        )


POSITIONS, SLOTS = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
"""Buffers that every step overwrites, like the model runner's."""


def row(slot: int, step: float = 0.0) -> tuple[list[float], int]:
    """What a step hands over for a slot. All numbers differ, between slots and between steps."""
    return [1000 * step + slot, -slot], slot + 100


def add(backlog: ContextBacklog, slots: list[int], step: float = 0.0) -> int:
    """Add rows for these slots, from buffers that are overwritten right afterwards."""
    features, positions = zip(*(row(slot, step) for slot in slots), strict=True)
    count = len(slots)
    SLOTS[:count], POSITIONS[:count] = torch.tensor(slots), torch.tensor(positions)
    stored = backlog.add(torch.tensor(features), POSITIONS[:count], SLOTS[:count])
    SLOTS.fill_(127)
    POSITIONS.fill_(-7)
    return stored


def waiting(backlog: ContextBacklog) -> Rows:
    """Rows that would be stored, read without changing anything."""
    rows: Rows = {}
    for number in np.flatnonzero(backlog._row_of >= 0).tolist():
        features, position, slot = waiting_row(backlog, int(backlog._row_of[number]))
        assert slot == number
        rows[number] = features.tolist(), int(position)
    return rows


def table(*requests: list[int]) -> np.ndarray:
    """Block table of these requests, padded with blocks that are not theirs."""
    width = max(map(len, requests))
    return np.array([blocks + [31] * (width - len(blocks)) for blocks in requests])


def test_a_shared_block_counts_for_each_and_is_stored_once() -> None:
    cache = Cache()
    backlog = make(cache)
    add(backlog, [4, 5, 6, 7, 8, 12])
    blocks, lens = table([1, 2], [1, 3]), np.array([5, 5])
    assert backlog.count(blocks, lens).tolist() == [5, 5]
    assert backlog.store(blocks, lens) == 6
    assert sorted(cache.rows) == [4, 5, 6, 7, 8, 12]


def test_each_request_has_its_own_blocks_and_no_more() -> None:
    """The tables of shorter requests go on with others' blocks, in which rows wait as well."""
    backlog = make(Cache())
    add(backlog, [4, 5, 8, 12, 13, 14, 16])  # blocks 1, 2, 3 and 4
    blocks = table([1, 2, 3], [3, 4, 1], [4, 3, 2], [2, 1, 3])
    lens = np.array([9, 4, 0, 5])  # part of a block is a block
    counts = backlog.count(blocks, lens)
    assert (counts.tolist(), counts.dtype.kind) == ([6, 3, 0, 3], "i")
    assert backlog.count(blocks[:0], lens[:0]).tolist() == []
    assert backlog.store(blocks[:0], lens[:0]) == 0
    assert backlog.store(blocks[1:3], lens[1:3]) == 3
    assert sorted(waiting(backlog)) == [4, 5, 8, 16]


def test_rows_of_blocks_with_a_new_owner_are_dropped() -> None:
    """Also if the new owner's blocks are larger."""
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
    assert cache.rows == {4: row(4, 7.0), 5: row(5, 7.0), 16: row(16)}


def test_a_full_ring_stores_many_rows_at_a_time() -> None:
    cache = Cache()
    backlog = make(cache, capacity=64)  # looks a quarter ahead
    stored = [add(backlog, [slot]) for slot in range(64)]
    assert not any(stored)
    stored = [add(backlog, [64 + slot]) for slot in range(32)]
    assert stored == [16, *[0] * 15, 16, *[0] * 15]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlog_module, "MAX_BYTES", 1000)
    monkeypatch.setattr(backlog_module, "MAX_ROWS", 400)

    def sizes(width: int) -> list[tuple[int, ...]]:
        made = ContextBacklog(None, width, torch.bfloat16, num_slots=8, page_size=4)  # type: ignore[arg-type]
        assert tensors_of(made)[0].dtype == torch.bfloat16
        assert tensors_of(made)[1].dtype == torch.int64
        return [tuple(buffer.shape) for buffer in tensors_of(made)]

    assert sizes(10) == [(50, 10), (50,)]  # limited by bytes
    assert sizes(1) == [(400, 1), (400,)]  # limited by rows


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Events: rows are added to blocks or stored at once, blocks change owners or are drafted."""
    blocks = st.integers(0, 7)
    steps = draw(
        st.lists(
            st.one_of(
                st.tuples(
                    st.sampled_from(["add", "store new"]),
                    st.sets(st.integers(0, 8 * BLOCK - 1), min_size=1, max_size=5),
                ),
                st.tuples(st.just("drop"), st.lists(blocks, max_size=4)),  # freed and taken again
                st.tuples(st.just("store"), st.sets(blocks, min_size=1, max_size=3)),
            ),
            max_size=30,
        )
    )
    return [(what, sorted(which)) for what, which in steps]


@given(histories(), st.sampled_from([6, 16, 64]))
def test_what_waits_and_what_is_stored_is_the_newest_context_of_every_slot(
    history: list[tuple[str, list[int]]], capacity: int
) -> None:
    """Compares features, positions and slots after every step, however small the ring, and how
    many rows a step says that it stored."""
    cache = Cache()
    backlog = make(cache, capacity)
    newest: Rows = {}  # newest row of each slot since its block changed owners
    for number, (what, which) in enumerate(history):
        before, said = cache.count, 0
        if what == "add":
            said = add(backlog, which, float(number))
            newest |= {slot: row(slot, float(number)) for slot in which}
        elif what == "store new":
            features, positions = zip(*(row(slot, float(number)) for slot in which), strict=True)
            rows = torch.tensor(features), torch.tensor(positions), torch.tensor(which)
            said = backlog.store_new(*rows)
            newest |= {slot: row(slot, float(number)) for slot in which}
        elif what == "drop":
            backlog.drop(which, BLOCK)
            for slot in [slot for slot in newest if slot // BLOCK in which]:
                del newest[slot]
                cache.rows.pop(slot, None)
        else:
            full = np.array([len(which) * BLOCK])
            due = backlog.count(np.array([which]), full)[0]
            said = backlog.store(np.array([which]), full)
            assert said == due
            assert not [slot for slot in waiting(backlog) if slot // BLOCK in which]
        assert cache.count - before == said
        assert cache.rows | waiting(backlog) == newest
        assert backlog._count == len(waiting(backlog)) <= capacity
