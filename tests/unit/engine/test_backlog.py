"""Context that waits: after catching up, the cache is as if every row had been stored at once."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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


BLOCKS, SLOTS_OF_STEP = (
    st.integers(0, 7),
    st.sets(st.integers(0, 8 * BLOCK - 1), min_size=1, max_size=5),
)
REQUESTS = st.lists(
    st.tuples(st.lists(BLOCKS, min_size=1, max_size=3, unique=True), st.integers(0, 3 * BLOCK)),
    max_size=4,
)
"""Blocks of each request and its context; part of a block is a block."""
EVENTS = st.one_of(
    st.tuples(st.sampled_from(["add", "store new"]), SLOTS_OF_STEP.map(sorted)),
    st.tuples(st.just("drop"), st.lists(BLOCKS, max_size=4)),  # freed and taken again
    st.tuples(st.just("drop larger"), st.lists(st.integers(0, 3), max_size=2)),  # twice as large
    st.tuples(st.just("store"), REQUESTS),
)


def table_of(requests: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    """Block table, whose shorter rows go on with others' blocks, and lengths of contexts."""
    table = np.array([[*blocks, 7, 6, 5][:3] for blocks, _ in requests], dtype=int).reshape(-1, 3)
    lens = [min(length, len(blocks) * BLOCK) for blocks, length in requests]
    return table, np.array(lens, dtype=int)


@settings(max_examples=2 * settings().max_examples)
@given(st.lists(EVENTS, max_size=30), st.sampled_from([6, 16, 64]))
def test_what_waits_and_what_is_stored_is_the_newest_context_of_every_slot(
    history: list[tuple[str, Any]], capacity: int
) -> None:
    """Compares features, positions and slots after every step, however small the ring, and how
    many rows a step says that it stored. Requests share blocks, whose rows are stored once."""
    cache = Cache()
    backlog = make(cache, capacity)
    newest: Rows = {}  # newest row of each slot since its block changed owners
    for number, (what, which) in enumerate(history):
        before, said = cache.count, 0
        if what == "add":
            said = add(backlog, which, float(number))
        elif what == "store new":
            features, positions = zip(*(row(slot, float(number)) for slot in which), strict=True)
            rows = torch.tensor(features), torch.tensor(positions), torch.tensor(which)
            said = backlog.store_new(*rows)
        elif what == "store":
            table, lens = table_of(which)
            waits = waiting(backlog)
            due = [
                {slot for slot in waits if slot // BLOCK in blocks[: -(-length // BLOCK)]}
                for blocks, length in zip(table.tolist(), lens.tolist(), strict=True)
            ]
            assert backlog.count(table, lens).tolist() == [len(one) for one in due]
            said = backlog.store(table, lens)
            assert waits.keys() - waiting(backlog).keys() == set().union(*due)
        else:
            size = BLOCK * (1 + (what == "drop larger"))
            backlog.drop(which, size)
            for slot in [slot for slot in newest if slot // size in which]:
                del newest[slot]
                cache.rows.pop(slot, None)
        if what in ("add", "store new"):
            newest |= {slot: row(slot, float(number)) for slot in which}
        assert cache.count - before == said
        assert cache.rows | waiting(backlog) == newest
        assert backlog._count == len(waiting(backlog)) <= capacity
