"""What kernels are held against on GPUs, in Triton's interpreter: cases that are small enough."""

from __future__ import annotations

import pytest
import torch

from support.kernel_oracle import Oracle
from support.kernel_oracles import ORACLES

pytestmark = [
    pytest.mark.usefixtures("runner"),
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
    # What is computed of rows that are not finite is not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CASES = [
    pytest.param(oracle, case, dtype, id=f"{oracle.name}, {case}")
    for oracle in ORACLES
    if oracle.interpreted is not None  # others' cases are those of their unit tests
    for case, dtype in oracle.cases_on("cpu")
]


@pytest.mark.parametrize(("oracle", "case", "dtype"), CASES)
def test_a_kernel_beside_its_oracle(oracle: Oracle, case: str, dtype: torch.dtype) -> None:
    oracle.check(case, dtype, "cpu")
