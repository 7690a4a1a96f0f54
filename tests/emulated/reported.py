"""Properties the device reports: an H100's, except for name and memory; and its memory use."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NAME = "NVIDIA H100, emulated"
CAPABILITY = (9, 0)
"""Compute capability, which vLLM's choices depend on."""


def of_torch_cuda(device: Any) -> dict[str, Callable[..., Any]]:
    """Functions of `torch.cuda`, by name."""

    def memory(name: str) -> Callable[..., int]:
        return lambda *_, **__: device.memory()[name]

    def free_and_total(*_: Any, **__: Any) -> tuple[int, int]:
        now = device.memory()
        return now["total"] - now["reserved"], now["total"]

    return {
        "get_device_name": lambda *_, **__: NAME,
        "get_device_capability": lambda *_, **__: CAPABILITY,
        "get_device_properties": lambda *_, **__: _properties(device),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *_, **__: True,
        "empty_cache": lambda: device.empty_cache(),
        "mem_get_info": free_and_total,
        "memory_allocated": memory("used"),
        "memory_reserved": memory("reserved"),
        "max_memory_allocated": memory("most used"),
        "max_memory_reserved": memory("most reserved"),
        "reset_peak_memory_stats": lambda *_, **__: device.reset_peaks(),
        "memory_stats": lambda *_, **__: _memory_stats(device.memory()),
    }


def _properties(device: Any) -> Any:
    return SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=device.memory()["total"],
        multi_processor_count=132,
        is_integrated=False,
        is_multi_gpu_board=False,
        warp_size=32,
        uuid="emulated",
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
    )


def _memory_stats(now: dict[str, int]) -> dict[str, int]:
    return {
        "num_device_alloc": now["device allocations"],
        "allocated_bytes.all.current": now["used"],
        "allocated_bytes.all.peak": now["most used"],
        "reserved_bytes.all.current": now["reserved"],
        "reserved_bytes.all.peak": now["most reserved"],
    }
