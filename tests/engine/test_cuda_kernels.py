"""Our Triton kernels on a GPU, compiled, beside their oracles. What they compute is tested in
tests/unit on a CPU; here, that a GPU's compiler and its shared memory agree."""

from __future__ import annotations

import pytest
import torch

from support.kernel_oracle import Oracle
from support.kernel_oracles import ORACLES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CASES = [
    pytest.param(oracle, case, dtype, id=f"{oracle.name}, {case}, {str(dtype)[6:]}")
    for oracle in ORACLES
    for case, dtype in oracle.cases_on("cuda")
]


@pytest.mark.parametrize(("oracle", "case", "dtype"), CASES)
def test_a_kernel_beside_its_oracle(oracle: Oracle, case: str, dtype: torch.dtype) -> None:
    oracle.check(case, dtype, "cuda")
