"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType

import torch
from numba.core import event as numba_event
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from vllm.compilation.counter import compilation_counter

NUMBA_COMPILES = numba_event.RecordingListener()
"""The start and the end of each function that numba compiles in this process: those that meet
arguments of types that are new to them among them."""
numba_event.register("numba:compile", NUMBA_COMPILES)


class WarmState:
    """Counts what changes after `seal`.

    Persistent buffers are known by their addresses: a captured graph reads the old ones, and an
    allocation inside a step costs time even without graphs. They are compared when somebody asks,
    not in every step.
    """

    def __init__(
        self, holders: Callable[[], Iterable[object]], late: CodeType | None = None
    ) -> None:
        """Watch an engine's buffers and compilations.

        Args:
            holders: returns the objects whose tensors are persistent buffers; None holds none.
            late: code of vLLM's that it compiles when the first request needs it; not counted.
        """
        self._holders = holders
        self._late = late

    def seal(self) -> None:
        """From now on, count."""
        self._addresses = self._now()
        self._before = self._compiled()

    def to_dict(self) -> dict[str, int]:
        """For `dflash_stats`. Buffers count that are not where they were, or are new."""
        before, now = self._addresses, self._now()
        moved = sum(a != b for a, b in zip(now, before, strict=False))
        return {
            "captures_after_warmup": self._compiled() - self._before,
            "reallocations_after_warmup": moved + abs(len(now) - len(before)),
        }

    def _now(self) -> list[int]:
        return [buffer.data_ptr() for each in self._holders() for buffer in tensors_of(each)]

    def _compiled(self) -> int:
        """Graph captures and compilations of this process so far, of any engine."""
        late = len(_debug_get_cache_entry_list(self._late)) if self._late else 0
        by_dynamo = counters["stats"]["unique_graphs"] - late
        by_numba = len(NUMBA_COMPILES.buffer) // 2
        return compilation_counter.num_cudagraph_captured + by_dynamo + by_numba


def tensors_of(holder: object) -> list[torch.Tensor]:
    """Those that an object has itself, or a tuple of them."""
    if holder is None:
        return []
    values = holder if isinstance(holder, tuple) else vars(holder).values()
    return [value for value in values if isinstance(value, torch.Tensor)]
