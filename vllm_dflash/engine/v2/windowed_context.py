"""Lets the drafter's attention read only the last tokens of each context, in any step.

A kernel writes block tables that begin some cache blocks later, and lengths that are shorter by as
many tokens; attention metadata is built from these. Nothing else changes: keys are stored rotated
by their own positions, rows keep their positions and slots, and a layer's own window compares
distances. So any attention backend that reads lengths on the device supports it, and graphs replay
it: the window, tables and lengths are tensors that stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers

from vllm_dflash.planning.window import WHOLE, Window

TILE = 1024
"""Columns of a block table that are copied at a time."""


@triton.jit(do_not_specialize=["stride", "block_rows"])
def _leave_out(  # type: ignore[no-untyped-def]
    block_table,  # [R, B]
    seq_lens,  # [R]
    window,  # [2]: tokens of context, 0 for all; shortest context with a window
    found_table,  # [R, B]
    found_lens,  # [R]
    stride,
    block_rows,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    length, tokens = tl.load(seq_lens + request), tl.load(window)
    context = length - block_rows
    skipped = tl.maximum(context - tokens, 0) // UNIT * UNIT
    skipped = tl.where((tokens > 0) & (context >= tl.load(window + 1)), skipped, 0)
    length -= skipped
    tl.store(found_lens + request, length)
    row, first = request.to(tl.int64) * stride, skipped // BLOCK_SIZE
    num_blocks = tl.minimum((length + BLOCK_SIZE - 1) // BLOCK_SIZE, stride - first)
    for start in range(0, num_blocks, TILE):
        column = start + tl.arange(0, TILE)
        is_block = column < num_blocks
        block = tl.load(block_table + row + first + column, mask=is_block, other=0)
        tl.store(found_table + row + column, block, mask=is_block)


class WindowedContext:
    """Block tables and lengths for the drafter's attention, as vLLM's but for what is left out."""

    def __init__(
        self, tables: BlockTables, groups: Sequence[int], buffers: InputBuffers, block_rows: int
    ) -> None:
        """Allocate for the tables of these cache groups.

        Args:
            tables: vLLM's block tables.
            groups: numbers of the cache groups with layers of the drafter.
            buffers: the speculator's buffers, with each request's context plus block.
            block_rows: rows of a block, 1 + K.
        """
        self._tables, self._groups, self._block_rows = tables, groups, block_rows
        # The lengths are the same for all groups, so all leave out the same tokens.
        self.unit = math.lcm(*(tables.block_sizes[group] for group in groups))
        self._lens = buffers.seq_lens
        self.tables, self.buffers = copy(tables), copy(buffers)
        self.tables.input_block_tables = [
            torch.zeros_like(table) if group in groups else table
            for group, table in enumerate(tables.input_block_tables)
        ]
        self.lens = self.buffers.seq_lens = torch.zeros_like(buffers.seq_lens)
        self._window = torch.zeros(2, dtype=torch.int32, device=buffers.seq_lens.device)
        self.window = WHOLE

    def owners(self) -> tuple[object, ...]:
        """Owners of the persistent tensors."""
        return self, tuple(self.tables.input_block_tables)

    def attend_to(self, window: Window) -> None:
        """Set the window for the blocks from now on. The host does not wait."""
        if window[:2] != self.window[:2]:
            self._window[0].fill_(window.tokens)
            self._window[1].fill_(window.shortest)
        self.window = window

    def most_tokens(self, longest: int) -> int:
        """Maximum length of a context plus block that attention reads, of those up to `longest`."""
        if not self.window.tokens:
            return longest
        kept = max(self.window.tokens + self.unit, self.window.shortest)
        return min(longest, kept + self._block_rows)

    def write_shortened(self, num_requests: int) -> None:
        """Write tables and lengths for the batch's first requests."""
        for group in self._groups:
            block_table = self._tables.input_block_tables[group]
            _leave_out[(num_requests,)](
                block_table,
                self._lens,
                self._window,
                self.tables.input_block_tables[group],
                self.lens,
                block_table.stride(0),
                self._block_rows,
                BLOCK_SIZE=self._tables.block_sizes[group],
                UNIT=self.unit,
                TILE=TILE,
            )

    @contextmanager
    def substituted_in(self, speculator: Any) -> Iterator[None]:
        """Let a speculator build metadata from these tables and lengths."""
        whole = speculator.block_tables, speculator.input_buffers, speculator.draft_max_seq_len
        speculator.block_tables, speculator.input_buffers = self.tables, self.buffers
        speculator.draft_max_seq_len = self.most_tokens(whole[2])
        try:
            yield
        finally:
            speculator.block_tables, speculator.input_buffers = whole[:2]
            speculator.draft_max_seq_len = whole[2]
