"""vLLM's sleeping memory (`--enable-sleep-mode`): what it gives back holds rubbish afterwards."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from emulated import torch_cuda

RUBBISH = b"\xfd\xff"
"""Content as in freed memory: NaN, and not a valid index."""


class SleepingMemory:
    """Replaces vLLM's `CuMemAllocator`, but keeps the addresses: host memory is not scarce."""

    instance: SleepingMemory | None = None

    def __init__(self) -> None:
        self._tag = ""
        self._asleep: dict[str, list[tuple[int, bytes | None, int]]] = {}

    @classmethod
    def get_instance(cls) -> SleepingMemory:
        cls.instance = cls.instance or cls()
        return cls.instance

    @contextmanager
    def use_memory_pool(
        self, tag: str = "default", *args: object, **named: object
    ) -> Iterator[None]:
        before, self._tag = self._tag, tag
        torch_cuda.device().set_tag(tag)
        try:
            yield
        finally:
            self._tag = before
            torch_cuda.device().set_tag(before)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Give back memory tagged "weights" and "kv_cache"; keep a copy of `offload_tags`."""
        kept = (offload_tags,) if isinstance(offload_tags, str) else tuple(offload_tags or ())
        device = torch_cuda.device()
        device.synchronize()
        for tag in ("weights", "kv_cache"):
            here = self._asleep[tag] = []
            for start, size in device.blocks(tag):
                here.append((start, ctypes.string_at(start, size) if tag in kept else None, size))
                ctypes.memmove(start, RUBBISH * (size // 2), size)

    def wake_up(self, tags: list[str] | None = None) -> None:
        torch_cuda.device().synchronize()
        for tag in tags or list(self._asleep):
            for start, contents, size in self._asleep.pop(tag, []):
                if contents is not None:
                    ctypes.memmove(start, contents, size)

    def get_current_usage(self) -> int:
        blocks = torch_cuda.device().blocks
        return sum(size for tag in ("weights", "kv_cache") for _, size in blocks(tag))

    def release_pools(self) -> None: ...
