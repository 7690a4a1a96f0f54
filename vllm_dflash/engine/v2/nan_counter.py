"""A counter that stays on the device, so that no step waits for it."""

from __future__ import annotations

import torch
from vllm.v1.utils import CpuGpuBuffer


class NanCounter:
    """Drafts whose logits were not finite."""

    def __init__(self, device: torch.device) -> None:
        self._count = CpuGpuBuffer(1, dtype=torch.int64, device=device)

    def observe(self, confidence: torch.Tensor, is_drafted: torch.Tensor) -> None:
        """Count drafted rows that nobody can be sure of, [Q] each; see `judge`. May be captured."""
        self._count.gpu += ((confidence == 0.0) & is_drafted).sum()

    def clear(self) -> None:
        """Count from zero again, in place: captured graphs count here."""
        self._count.gpu.zero_()
        self._count.cpu.zero_()

    def total(self) -> int:
        """All of them. Waits for the device."""
        return int(self._count.gpu.item())

    def lately(self) -> int:
        """As many as there were when this was last asked. Waits for nothing."""
        seen = int(self._count.np[0])
        self._count.copy_to_cpu()
        return seen
