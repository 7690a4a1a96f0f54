"""Kernels against the oracles used on GPUs, in Triton's interpreter, if the cases are small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from support.compile_child import launched_kernels
from support.kernel_oracle import Oracle
from support.kernel_oracles import ORACLES

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CASES = [
    pytest.param(oracle, case, dtype, id=f"{oracle.name}, {case}")
    for oracle in ORACLES
    for case, dtype in oracle.cases_on("cpu")
]


@pytest.mark.parametrize(("oracle", "case", "dtype"), CASES)
def test_a_kernel_beside_its_oracle(oracle: Oracle, case: str, dtype: torch.dtype) -> None:
    oracle.check(case, dtype, "cpu")


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
