"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from numba.core import event as numba_event
from torch._dynamo.callback import callback_handler
from vllm.compilation.counter import compilation_counter


class Compilations(numba_event.Listener):
    """Counts what is compiled in this process, by whatever engine: by TorchDynamo, and functions of
    numba's that meet arguments of types that are new to them."""

    def __init__(self) -> None:
        self.count = 0
        numba_event.register("numba:compile", self)

    def add(self, _: object) -> None:
        """Something begins to be compiled."""
        self.count += 1

    on_start = add

    def on_end(self, event: numba_event.Event) -> None:
        """It was compiled."""

    def listen(self) -> None:
        """To TorchDynamo as well, whose list `torch._dynamo.reset` empties."""
        if self.add not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self.add)


COMPILATIONS = Compilations()


class WarmState:
    """Counts what changes after `seal`.

    Persistent buffers are known by their addresses: a captured graph reads the old ones, and an
    allocation inside a step costs time even without graphs. They are compared when somebody asks,
    not in every step.
    """

    def __init__(self, holders: Callable[[], Iterable[object]]) -> None:
        """`holders`: objects whose tensors are persistent buffers, as they are when it is called;
        None holds none."""
        self._holders = holders
        self._addresses: list[int] | None = None
        self._before = 0

    def seal(self) -> None:
        """From now on, count."""
        COMPILATIONS.listen()
        self._addresses = self._now()
        self._before = _compiled()

    def to_dict(self) -> dict[str, int]:
        """For `dflash_stats`. Buffers count that are not where they were, or are new."""
        if self._addresses is None:
            return {"captures_after_warmup": 0, "reallocations_after_warmup": 0}
        before, now = self._addresses, self._now()
        moved = sum(a != b for a, b in zip(now, before, strict=False))
        return {
            "captures_after_warmup": _compiled() - self._before,
            "reallocations_after_warmup": moved + abs(len(now) - len(before)),
        }

    def _now(self) -> list[int]:
        return [buffer.data_ptr() for each in self._holders() for buffer in tensors_of(each)]


def tensors_of(holder: object) -> list[torch.Tensor]:
    """Those that an object has itself."""
    if holder is None:
        return []
    return [value for value in vars(holder).values() if isinstance(value, torch.Tensor)]


def _compiled() -> int:
    """Compilations and graph captures of this process so far."""
    return compilation_counter.num_cudagraph_captured + COMPILATIONS.count
