"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from vllm.compilation.counter import compilation_counter


class WarmState:
    """Counts what changes after `seal`.

    Persistent buffers are known by their addresses: a captured graph reads the old ones, and an
    allocation inside a step costs time even without graphs. They are compared when somebody asks,
    not in every step.
    """

    def __init__(self, buffers: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._buffers = buffers
        self._addresses: list[int] | None = None
        self._captures_before = 0
        self.compilations = 0
        _tell_of_compilations(self)

    def observe_compilation(self) -> None:
        """Something is compiled, by whatever engine of this process."""
        self.compilations += self._addresses is not None

    def seal(self) -> None:
        """From now on, count."""
        self._addresses = [buffer.data_ptr() for buffer in self._buffers()]
        self._captures_before = compilation_counter.num_cudagraph_captured

    def reallocations(self) -> int:
        """Buffers that are not where they were, or are new."""
        if self._addresses is None:
            return 0
        now = [buffer.data_ptr() for buffer in self._buffers()]
        moved = sum(a != b for a, b in zip(now, self._addresses, strict=False))
        return moved + abs(len(now) - len(self._addresses))

    def to_dict(self) -> dict[str, int]:
        """For `dflash_stats`."""
        captured = compilation_counter.num_cudagraph_captured - self._captures_before
        is_sealed = self._addresses is not None
        return {
            "captures_after_warmup": (captured + self.compilations) if is_sealed else 0,
            "reallocations_after_warmup": self.reallocations(),
        }


def _tell_of_compilations(state: WarmState) -> None:
    """As long as it lives: torch's list is the process's, and would keep the engine's models."""
    reference = weakref.ref(state)

    def tell(_: CallbackArgs) -> None:
        if (alive := reference()) is not None:
            alive.observe_compilation()

    def forget() -> None:
        with suppress(ValueError):  # `torch._dynamo.reset` has emptied the list
            callback_handler.remove_start_callback(tell)

    callback_handler.register_start_callback(tell)
    weakref.finalize(state, forget)
