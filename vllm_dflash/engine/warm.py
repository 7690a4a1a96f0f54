"""What must not happen any more once an engine is warm: compiling, capturing, reallocating."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from numba.core import event as numba_event
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from vllm.compilation.counter import compilation_counter
from vllm.v1.sample.ops.logprobs import batched_count_greater_than

NUMBA_COMPILES = numba_event.RecordingListener()
"""The start and the end of each function that numba compiles in this process: those that meet
arguments of types that are new to them among them."""
numba_event.register("numba:compile", NUMBA_COMPILES)
RANKS = getattr(  # under TORCHDYNAMO_DISABLE=1, torch.compile leaves a function as it is
    batched_count_greater_than, "_torchdynamo_orig_callable", batched_count_greater_than
).__code__
"""What ranks a token among all, for logprobs: on V1, vLLM compiles it for the first request that
asks for any, which waits for that in a plain engine as well (2 s; 9 s on a machine's first)."""


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

    def seal(self) -> None:
        """From now on, count."""
        self._addresses = self._now()
        self._before = _compiled()

    def to_dict(self) -> dict[str, int]:
        """For `dflash_stats`. Buffers count that are not where they were, or are new."""
        before, now = self._addresses, self._now()
        moved = sum(a != b for a, b in zip(now, before, strict=False))
        return {
            "captures_after_warmup": _compiled() - self._before,
            "reallocations_after_warmup": moved + abs(len(now) - len(before)),
        }

    def _now(self) -> list[int]:
        return [buffer.data_ptr() for each in self._holders() for buffer in tensors_of(each)]


def tensors_of(holder: object) -> list[torch.Tensor]:
    """Those that an object has itself, or a tuple of them."""
    if holder is None:
        return []
    values = holder if isinstance(holder, tuple) else vars(holder).values()
    return [value for value in values if isinstance(value, torch.Tensor)]


def _compiled() -> int:
    """Graph captures and compilations of this process so far, but for `RANKS`; of any engine."""
    by_dynamo = counters["stats"]["unique_graphs"] - len(_debug_get_cache_entry_list(RANKS))
    return compilation_counter.num_cudagraph_captured + by_dynamo + len(NUMBA_COMPILES.buffer) // 2
