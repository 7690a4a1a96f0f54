"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from vllm.compilation.counter import compilation_counter


class WarmState:
    """Counts what changes after `seal`.

    Persistent buffers are known by their addresses: a captured graph reads the old ones, and an
    allocation inside a step costs time even without graphs.
    """

    def __init__(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._buffers = buffers
        self._addresses: list[int] | None = None
        self._captures_before = 0
        self.compilations = 0
        self.reallocations = 0
        callback_handler.register_start_callback(self._observe_compilation)

    def _observe_compilation(self, _: CallbackArgs) -> None:
        self.compilations += self._addresses is not None

    def seal(self) -> None:
        """From now on, count."""
        self._addresses = [buffer.data_ptr() for buffer in self._buffers()]
        self._captures_before = compilation_counter.num_cudagraph_captured

    def check(self) -> None:
        """A step has ended: have buffers moved?"""
        if self._addresses is None:
            return
        now = [buffer.data_ptr() for buffer in self._buffers()]
        if now != self._addresses:
            moved = sum(a != b for a, b in zip(now, self._addresses, strict=False))
            self.reallocations += moved + abs(len(now) - len(self._addresses))
            self._addresses = now

    def to_dict(self) -> dict[str, int]:
        """For `dflash_stats`."""
        captured = compilation_counter.num_cudagraph_captured - self._captures_before
        is_sealed = self._addresses is not None
        return {
            "captures_after_warmup": (captured + self.compilations) if is_sealed else 0,
            "reallocations_after_warmup": self.reallocations,
        }
