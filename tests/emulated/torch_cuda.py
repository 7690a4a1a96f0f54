"""The interface of `torch.cuda` on the emulated device of `device/`.

Call `install()` before anything imports vLLM.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch

from emulated import build, reported


class Schedule(IntEnum):
    """When to do work that was not waited for yet."""

    AT_ONCE = 0
    LATEST = 1
    """Only when the host waits for it."""
    SOME_AHEAD = 2
    """Chosen streams at once, all others as late as possible."""
    RANDOM = 3
    """Some of it at random times; each seed gives one order."""


_device: Any = None


def is_installed() -> bool:
    return _device is not None


def device() -> Any:
    """Return the functions of `device/device.cpp`."""
    assert _device is not None, "the emulated device is not installed in this process"
    return _device


def set_schedule(kind: Schedule, ahead: tuple[int, ...] = (), seed: int = 0) -> None:
    """Use this schedule from now on. `ahead`: numbers of streams."""
    device().set_schedule(int(kind), ahead, seed)


class DeviceTime:
    """Replaces `time` by the device's work, so that step times leave out the interpreter.
    `set_speed` sets the time of a launch, of a replayed launch and of a byte."""

    @staticmethod
    def perf_counter() -> float:
        return device().seconds()


class Stream(torch.Stream):
    """Replaces `torch.cuda.Stream`, which needs parts that a CPU build lacks."""

    def __new__(cls, device: Any = None, priority: int = 0, **named: Any) -> Stream:
        if named:  # an existing stream, by its number
            return super().__new__(cls, **named)
        return super().__new__(cls, device=torch.device("cuda:0"), priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class _IsEvent(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.Event)


class Event(metaclass=_IsEvent):
    """Creates PyTorch's generic events, which the device's guard handles."""

    def __new__(  # type: ignore[misc]
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> torch.Event:
        return torch.Event(
            device=torch.device("cuda:0"),
            enable_timing=enable_timing,
            blocking=blocking,
            interprocess=interprocess,
        )


def stream_of(number: int) -> Stream:
    return Stream(stream_id=number, device_index=0, device_type=1)


def _set_stream(stream: Stream | None) -> None:
    if stream is not None:
        device().set_stream(stream.stream_id)


_pools = itertools.count(1)


def _new_pool() -> tuple[int, int]:
    return (0, next(_pools))


class CUDAGraph:
    """Replaces `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._number: int | None = None
        self._pool: tuple[int, int] | None = None

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,
    ) -> None:
        self._pool = pool or _new_pool()
        self._number = device().begin_capture(self._pool[1])

    def capture_end(self) -> None:
        device().end_capture(self._number)

    def replay(self) -> None:
        if self._number is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        device().replay(self._number)

    def reset(self) -> None:
        if self._number is not None:
            device().drop_graph(self._number)
            self._number = None

    def pool(self) -> tuple[int, int]:
        if self._pool is None:
            raise RuntimeError(
                "Called CUDAGraph::pool() without a preceding successful capture_begin."
            )
        return self._pool

    def names(self) -> list[str]:
        """Return the names of what was captured, in order. PyTorch's class has no such method."""
        return device().names_of(self._number)

    def register_generator_state(self, generator: Any) -> None: ...
    def enable_debug_mode(self) -> None: ...
    def debug_dump(self, path: str) -> None: ...
    def instantiate(self) -> None: ...

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # Python may be shutting down
            self.reset()


def _nothing() -> Callable[..., None]:
    """Return a new function for each name: Dynamo has a rule for each function."""
    return lambda *args, **named: None


def install() -> None:
    """Give PyTorch a device `cuda:0` in this process."""
    import torch._dynamo  # it inspects torch.cuda's functions, and knows PyTorch's own

    global _device
    _device = build.load()
    _device.install()
    set_schedule(Schedule.LATEST)
    for name, value in _of_c().items():
        setattr(torch._C, name, value)
    for name, value in _of_cuda().items():
        setattr(torch.cuda, name, value)
    for module, names in (
        (torch.cuda.graphs, ("CUDAGraph", "is_current_stream_capturing", "graph_pool_handle")),
        (torch.cuda.streams, ("Stream", "Event")),
        (torch.cuda.random, ("manual_seed", "manual_seed_all")),
        (torch.cuda.memory, ("empty_cache", "mem_get_info", "memory_allocated", "memory_reserved")),
    ):
        for name in names:
            setattr(module, name, getattr(torch.cuda, name))
    torch.cuda.memory.get_allocator_backend = lambda: "emulated"
    torch.backends.cuda.is_built = lambda: True
    _define_operators()
    atexit.register(_drain)


def _of_c() -> dict[str, Any]:
    """Names that a CUDA build puts into `torch._C`."""
    return {
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_init": _nothing(),
        "_cuda_setDevice": _nothing(),
        "_cuda_getDevice": lambda: 0,
        "_cuda_exchangeDevice": lambda device: 0,
        "_cuda_maybeExchangeDevice": lambda device: 0,
        "_cuda_set_sync_debug_mode": _device.set_sync_mode,
        "_cuda_get_sync_debug_mode": _device.get_sync_mode,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_synchronize": _device.synchronize,
        "_cuda_emptyCache": _device.empty_cache,
        "_host_emptyCache": _nothing(),
        "_accelerator_emptyHostCache": _nothing(),
        "_cuda_isCurrentStreamCapturing": _device.is_capturing,
        "_cuda_getCurrentBlasHandle": lambda: 0,
        "_cuda_getCompiledVersion": lambda: 13000,
        "_accelerator_getAllocatorSettings": lambda: "",
        "_accelerator_setAllocatorSettings": _nothing(),
        "_cuda_getCurrentRawStream": lambda device: _device.current_stream(),
    }


def _of_cuda() -> dict[str, Any]:
    """Functions and classes of `torch.cuda`."""
    return reported.of_torch_cuda(_device) | {
        "_lazy_init": _nothing(),
        "_lazy_call": _nothing(),
        "_initialized": True,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_device_count_nvml": lambda: -1,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing(),
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "synchronize": lambda device=None: _device.synchronize(),
        "current_stream": lambda device=None: stream_of(_device.current_stream()),
        "default_stream": lambda device=None: stream_of(0),
        "set_stream": _set_stream,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": _new_pool,
        "is_current_stream_capturing": lambda: _device.is_capturing(),
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "current_blas_handle": lambda: 0,
        "_sleep": _nothing(),  # everything is late already
        "default_generators": (torch.Generator(),),
    }


_libraries: list[Any] = []
"""Libraries that hold the operators' rules; a rule is gone once its library is."""


def _define_operators() -> None:
    """Define operators without a CPU kernel in PyTorch, or with one that asks the device a size."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("repeat_interleave.Tensor", _repeat_interleave, "CUDA")
    library.impl("_conv_depthwise2d", _conv_depthwise2d, "CUDA")
    _libraries.append(library)


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    if output_size is None:  # only the device knows it: the host waits
        return torch.repeat_interleave(repeats.cpu()).to(repeats.device)
    # As on a GPU, it is not checked against the sum.
    places = torch.arange(output_size, device=repeats.device)
    found = torch.searchsorted(repeats.cumsum(0), places, right=True)
    return found.clamp(max=max(len(repeats) - 1, 0)).to(repeats.dtype)


def _conv_depthwise2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: list[int],
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> torch.Tensor:
    """Apply one filter to each channel: x [N, C, H, W], weight [C, 1, *kernel_size]."""
    assert weight.shape[0] == x.shape[1]
    assert list(dilation) == [1, 1]
    x = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    windows = x.unfold(2, kernel_size[0], stride[0]).unfold(3, kernel_size[1], stride[1])
    found = torch.einsum("nchwij,cij->nchw", windows, weight[:, 0])
    return found if bias is None else found + bias[:, None, None]


def _drain() -> None:
    """Finish what is queued before Python ends: it holds Python functions."""
    while any(device().pending().values()):
        try:
            device().synchronize()
        except Exception as error:
            print("emulated device, at exit:", error, file=sys.stderr)
