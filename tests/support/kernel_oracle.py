"""What a Triton kernel of ours is held against, on whatever device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.int32: 0.0}
"""By which what is found may differ, of 1 or of itself: by the dtype of what a kernel is given."""


class Compare(Protocol):
    """Runs a kernel on a case."""

    def __call__(
        self, case: Any, *, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What it gives, and what it should, both on the CPU."""


@dataclass(frozen=True)
class Oracle:
    """A kernel, cases that only a GPU shows, and how each is compared.

    What must be exact beside numbers that need not be is asserted by `compare`.
    """

    name: str
    cases: Mapping[str, Any]
    compare: Compare
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)
    limits: Mapping[torch.dtype, float] = field(default_factory=lambda: LIMITS)
    interpreted: Collection[str] | None = None
    """Cases small enough for Triton's interpreter; None: all of them."""

    def cases_on(self, device: str) -> list[tuple[str, torch.dtype]]:
        """What is tried there: on a CPU, small cases in one dtype."""
        if device == "cuda":
            return [(case, dtype) for case in self.cases for dtype in self.dtypes]
        small = self.cases if self.interpreted is None else self.interpreted
        return [(case, self.dtypes[-1]) for case in self.cases if case in small]

    def check(self, case: str, dtype: torch.dtype, device: torch.device | str) -> float:
        """Raises AssertionError where the kernel is wrong. Returns the largest difference."""
        found, expected = self.compare(self.cases[case], device=device, dtype=dtype)
        limit = self.limits[dtype]
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
        return float((found.double() - expected.double()).abs().max())
