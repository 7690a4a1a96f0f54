"""Rows of the planner's tables, given to requests while they run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_dflash.planning import Ints

NOBODY = np.zeros(0, dtype=np.int64)


class RequestRows:
    """A row number for every running request, so that what is known of them can be arrays."""

    def __init__(self, num_rows: int) -> None:
        self._row_of: dict[str, int] = {}
        self._free = list(range(num_rows))
        self._last: tuple[Sequence[str], Ints] = ((), NOBODY)

    def of(self, ids: Sequence[str]) -> tuple[Ints, Ints]:
        """Rows of the requests in the batch, [R], and which of those rows are new requests'.

        Requests that are not in the batch lose their rows when rows run out.
        """
        last_ids, last_rows = self._last
        if ids == last_ids:
            return last_rows, NOBODY
        row_of = self._row_of
        unknown = [name for name in ids if name not in row_of]
        if len(unknown) > len(self._free):
            for name in row_of.keys() - set(ids):
                self._free.append(row_of.pop(name))
        for name in unknown:
            row_of[name] = self._free.pop()
        rows = np.fromiter((row_of[name] for name in ids), np.int64)
        fresh = np.fromiter((row_of[name] for name in unknown), np.int64)
        self._last = (ids, rows)
        return rows, fresh
