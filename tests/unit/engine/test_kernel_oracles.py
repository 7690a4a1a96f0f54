"""The oracles used on GPUs know all our kernels; in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.interpreter import GridExecutor

from support.compile_child import launched_kernels
from support.kernel_oracles import ORACLES

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_each_kernel_is_held_against_something(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[str] = set()
    run = GridExecutor.__call__

    def noted(grid: Any, *args: Any, **kwargs: Any) -> Any:
        if grid.fn.__module__.startswith("vllm_dflash."):  # not vLLM's, which oracles may run
            launched.add(grid.fn.__name__)
        return run(grid, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", noted)
    for oracle in ORACLES:
        case, dtype = oracle.cases_on("cpu")[0]
        oracle.check(case, dtype, "cpu")
    assert {name.split(".")[1] for name in launched_kernels()} == launched
