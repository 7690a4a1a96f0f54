"""Counts what must not happen after warm-up: compilation, graph capture, reallocation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType

import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from vllm.compilation.counter import compilation_counter


class WarmState:
    """Counts what changes after `seal`.

    Persistent buffers are tracked by address: a captured graph reads the old one, and an allocation
    inside a step costs time even without graphs. Addresses are compared in `to_dict`, not in every
    step.
    """

    def __init__(
        self, holders: Callable[[], Iterable[object]], late: CodeType | None = None
    ) -> None:
        """Watch an engine's buffers and compilations.

        Args:
            holders: returns the objects whose tensors are persistent buffers, or None for objects
                that do not exist.
            late: vLLM code that is compiled when the first request needs it; not counted.
        """
        self._holders = holders
        self._late = late

    def seal(self) -> None:
        """Start counting."""
        self._addresses = self._now()
        self._before = self._compiled()

    def to_dict(self) -> dict[str, int]:
        """Counts for `dflash_stats`; buffers count if they moved, are new, or are gone."""
        before, now = self._addresses, self._now()
        moved = sum(a != b for a, b in zip(now, before, strict=False))
        return {
            "captures_after_warmup": self._compiled() - self._before,
            "reallocations_after_warmup": moved + abs(len(now) - len(before)),
        }

    def _now(self) -> list[int]:
        return [buffer.data_ptr() for each in self._holders() for buffer in tensors_of(each)]

    def _compiled(self) -> int:
        """Number of graph captures and compilations in this process so far, by any engine."""
        late = len(_debug_get_cache_entry_list(self._late)) if self._late else 0
        by_dynamo = counters["stats"]["unique_graphs"] - late
        return compilation_counter.num_cudagraph_captured + by_dynamo


def tensors_of(holder: object) -> list[torch.Tensor]:
    """Tensors in a tuple, or in an object's own attributes; none for None."""
    if holder is None:
        return []
    values = holder if isinstance(holder, tuple) else vars(holder).values()
    return [value for value in values if isinstance(value, torch.Tensor)]
