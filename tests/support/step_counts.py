"""Count what our code does in a step: lines that run, and what it launches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from triton.runtime.interpreter import GridExecutor, InterpretedFunction

import vllm_dflash

OURS = str(Path(vllm_dflash.__file__).parent)


def _place(frame: FrameType, folder: str) -> str:
    return f"{frame.f_code.co_filename.removeprefix(folder + '/')}:{frame.f_lineno}"


@contextmanager
def lines_counted(found: Counter[str]) -> Iterator[None]:
    """Count the lines of our code that run: a loop over requests shows in their number.

    Lines of kernels are left out, which a device runs for all requests at once.
    """
    kernels = {
        (module.__file__, name)
        for module in [*sys.modules.values()]
        if (getattr(module, "__file__", None) or "").startswith(OURS)
        for name, value in vars(module).items()
        if isinstance(value, InterpretedFunction)
    }

    def count(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or (code.co_filename, code.co_name) in kernels:
            return None
        if event == "line":
            found[_place(frame, OURS)] += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


NO_LAUNCH = (
    *("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh"),
    *("aten::item", "aten::_local_scalar_dense", "aten::is_pinned"),  # of tensors on the host
)


class _Launches(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func.name()
        returned = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if name.startswith("aten::to."):  # inference mode does not split it
            is_view = found is args[0]
        if not is_view and not name.startswith(NO_LAUNCH):
            self._found[name] += 1
        return found


@contextmanager
def launches_counted(found: Counter[str]) -> Iterator[None]:
    """Count what is launched inside the block, by anybody: operations of torch other than views,
    Triton's kernels, and captured graphs, which count as one."""
    run_kernel, replay = GridExecutor.__call__, torch.cuda.CUDAGraph.replay

    def kernel(grid: Any, *args: Any, **kwargs: Any) -> Any:
        if _innermost() is not None:
            found[f"kernel {grid.fn.__name__}"] += 1
        with _disable_current_modes():
            return run_kernel(grid, *args, **kwargs)

    def graph(captured: Any) -> None:
        found["graph"] += 1
        with _disable_current_modes():
            replay(captured)

    with pytest.MonkeyPatch.context() as patch, _Launches(found):
        patch.setattr(GridExecutor, "__call__", kernel)
        patch.setattr(torch.cuda.CUDAGraph, "replay", graph)
        yield


def _innermost() -> _Launches | None:
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, _Launches) else None
