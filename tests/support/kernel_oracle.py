"""Oracles to compare our Triton kernels with, on any device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.int32: 0.0}
"""Absolute and relative differences that are allowed, by the dtype of a kernel's inputs."""


class Compare(Protocol):
    """Runs a kernel on a case."""

    def __call__(
        self, case: Any, *, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernel's result and the expected one, both on the CPU."""


@dataclass(frozen=True)
class Oracle:
    """A kernel, cases that only a GPU shows, and how each is compared.

    `compare` asserts what must be exact beside numbers that need not be.
    """

    name: str
    cases: Mapping[str, Any]
    compare: Compare
    interpreted: Collection[str]
    """Cases small enough for Triton's interpreter."""
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    limits: Mapping[torch.dtype, float] = field(default_factory=lambda: LIMITS)

    def cases_on(self, device: str) -> list[tuple[str, torch.dtype]]:
        """Return the cases to try on a device: on a CPU, small ones in one dtype."""
        if device == "cuda":
            return [(case, dtype) for case in self.cases for dtype in self.dtypes]
        return [(case, self.dtypes[-1]) for case in self.interpreted]

    def check(self, case: str, dtype: torch.dtype, device: torch.device | str) -> float:
        """Raise AssertionError if the kernel is wrong. Return the largest difference."""
        found, expected = self.compare(self.cases[case], device=device, dtype=dtype)
        limit = self.limits[dtype]
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
        return float((found.double() - expected.double()).abs().max())
