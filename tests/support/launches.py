"""Count what we launch in a step beyond the drafter's block: kernels and copies, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from vllm_dflash.engine.v2.device_step import DeviceStep
from vllm_dflash.engine.v2.trimming import DraftBudget

NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh")
OURS = (
    (DeviceStep, "before_block"),
    (DeviceStep, "after_block"),
    (DraftBudget, "record_confidences"),
    (DraftBudget, "reallocate_drafts"),
)
COPY = "aten::to.dtype_layout"


class _Operations(TorchDispatchMode):
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
    """Count what `DeviceStep` and `DraftBudget` launch inside the block."""
    run_kernel = GridExecutor.__call__

    def kernel(grid: Any, *args: Any, **kwargs: Any) -> Any:
        mode = _innermost()
        with _disable_current_modes():
            if mode is not None:
                found[f"kernel {grid.fn.__name__}"] += 1
            return run_kernel(grid, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", kernel)
        for owner, name in OURS:
            original = getattr(owner, name)

            def counted(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                with _Operations(found):
                    return original(*args, **kwargs)

            patch.setattr(owner, name, counted)
        yield


def _innermost() -> _Operations | None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, _Operations) else None
