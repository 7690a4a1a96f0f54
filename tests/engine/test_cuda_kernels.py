"""Our Triton kernels, compiled for a GPU, beside their oracles. tests/unit tests on a CPU what they
compute; these tests check that a GPU's compiler and its shared memory agree."""

from __future__ import annotations

import pytest
import torch

from emulated import torch_cuda
from support.kernel_oracle import Oracle
from support.kernel_oracles import ORACLES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # On an emulated GPU they are interpreted, as in tests/unit/engine/test_kernels_compile.py.
    *([pytest.mark.slow] if torch_cuda.is_installed() else []),
]
CASES = [
    pytest.param(oracle, case, dtype, id=f"{oracle.name}, {case}, {str(dtype)[6:]}")
    for oracle in ORACLES
    # On an emulated GPU, kernels are interpreted: small cases.
    for case, dtype in oracle.cases_on("cpu" if torch_cuda.is_installed() else "cuda")
]


@pytest.mark.parametrize(("oracle", "case", "dtype"), CASES)
def test_a_kernel_beside_its_oracle(oracle: Oracle, case: str, dtype: torch.dtype) -> None:
    oracle.check(case, dtype, "cuda")
