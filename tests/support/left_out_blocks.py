"""Contexts whose first cache blocks the drafter's attention leaves out, beside numpy."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBuffers

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.windowed_context import WindowedContext
from vllm_dflash.planning.window import Window

UNTOUCHED = -7


@dataclass
class Case:
    """A batch of requests with a block each, of `block_rows` rows."""

    num_requests: int
    longest: int
    window: Window
    block_sizes: tuple[int, ...] = (16,)
    """Block sizes of the drafter's cache groups; one more group is not the drafter's."""
    block_rows: int = 8


def windowed(
    context_lens: np.ndarray, case: Case, device: torch.device | str = "cpu"
) -> tuple[WindowedContext, list[torch.Tensor]]:
    """Return what attention is given for these contexts, and vLLM's own tables."""
    count, where = len(context_lens), torch.device(device)
    sizes = [*case.block_sizes, case.block_sizes[0]]
    longest = case.longest + case.block_rows
    columns = [-(-longest // size) for size in sizes]
    numbers = (torch.arange(1, 1 + (count + 1) * each, dtype=torch.int32) for each in columns)
    tables: Any = SimpleNamespace(
        block_sizes=sizes,
        input_block_tables=[each.view(count + 1, -1).to(where) for each in numbers],
    )
    buffers = InputBuffers(count + 1, 8 * count, where)
    buffers.seq_lens[:count] = torch.from_numpy(context_lens + case.block_rows)
    found = WindowedContext(tables, range(len(case.block_sizes)), buffers, case.block_rows)
    for each in (*found.tables.input_block_tables[:-1], found.lens):
        each.fill_(UNTOUCHED)
    found.attend_to(case.window)
    found.write_shortened(count)
    return found, tables.input_block_tables


def expected(
    context_lens: np.ndarray, case: Case, tables: list[torch.Tensor]
) -> tuple[list[int], list[torch.Tensor]]:
    """Return lengths and tables by hand; blocks behind a request are not written."""
    unit = int(np.lcm.reduce(case.block_sizes))
    skipped = case.window.skipped(context_lens, unit).tolist()
    lens: list[int] = []
    found = []
    for size, table in zip(case.block_sizes, tables, strict=False):
        rows = torch.full_like(table, UNTOUCHED)
        lens = []
        for row, (context, left_out) in enumerate(zip(context_lens.tolist(), skipped, strict=True)):
            first, length = left_out // size, context + case.block_rows
            blocks = table[row, first : -(-length // size)]
            rows[row, : len(blocks)] = blocks
            lens.append(length - left_out)
        found.append(rows)
    return [*lens, UNTOUCHED], found


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare contexts of all lengths, the longest and an empty one among them."""
    lens = np.random.default_rng(0).integers(0, case.longest + 1, case.num_requests)
    lens[:2] = [case.longest, 0][: case.num_requests]
    found, tables = windowed(lens.astype(np.int32), case, device)
    new_lens, rows = expected(lens, case, tables)
    assert found.lens.tolist() == new_lens
    written = [each.flatten() for each in found.tables.input_block_tables[: len(rows)]]
    return torch.cat(written).cpu(), torch.cat([each.flatten() for each in rows]).cpu()


LEFT_OUT = Oracle(
    "blocks left out of a context",
    {
        "all is read": Case(5, 900, Window()),
        "a window": Case(9, 900, Window(64, 128, 0)),
        "a window smaller than a block": Case(9, 900, Window(3, 5, 0)),
        "groups of other block sizes": Case(6, 900, Window(50, 60, 0), (16, 48)),
        "256 of 131,072": Case(256, 131_072, Window(1024, 2048, 0), block_rows=16),
    },
    compare,
    dtypes=(torch.int32,),
    interpreted=(
        *("all is read", "a window", "a window smaller than a block"),
        "groups of other block sizes",
    ),
)
