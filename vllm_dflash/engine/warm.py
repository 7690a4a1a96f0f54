"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from numba.core import event as numba_event
from torch._dynamo.callback import callback_handler
from vllm.compilation.counter import compilation_counter

NUMBA_COMPILES = "numba:compile"


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
    """As long as it lives: torch's list is the process's, and would keep the engine's models.

    And of functions of numba's that meet arguments of types that are new to them.
    """
    reference = weakref.ref(state)

    def tell(_: object) -> None:
        if (alive := reference()) is not None:
            alive.observe_compilation()

    listener = NumbaListener(tell)

    def forget() -> None:
        with suppress(ValueError):  # `torch._dynamo.reset` has emptied the list
            callback_handler.remove_start_callback(tell)
        numba_event.unregister(NUMBA_COMPILES, listener)

    callback_handler.register_start_callback(tell)
    numba_event.register(NUMBA_COMPILES, listener)
    weakref.finalize(state, forget)


class NumbaListener(numba_event.Listener):
    """Tells when a function begins to be compiled, or is looked for among those on disk."""

    def __init__(self, tell: Callable[[object], None]) -> None:
        self._tell = tell

    def on_start(self, event: numba_event.Event) -> None:
        """It begins."""
        self._tell(event)

    def on_end(self, event: numba_event.Event) -> None:
        """It ends."""
