"""Counters that stay on the device, so that no step waits for them."""

from __future__ import annotations

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_dflash.planning import Bools


class DeviceCounters:
    """Sums of what became of drafts; read only when somebody asks."""

    def __init__(self, device: torch.device) -> None:
        self._verified = torch.zeros(3, dtype=torch.int64, device=device)
        self._not_finite = torch.zeros(1, dtype=torch.int64, device=device)

    def observe_verification(
        self, num_sampled: torch.Tensor, num_rejected: torch.Tensor, own: Bools
    ) -> None:
        """Count one batch: tokens each request got, drafts it lost, and if those were its own.

        [R] each, the last on the host.
        """
        accepted = (num_sampled - 1).clamp(min=0)
        drafted = accepted + num_rejected
        if not own.all():
            counts = async_tensor_h2d(own, device=num_sampled.device)
            accepted, drafted = accepted * counts, drafted * counts
        self._verified += torch.stack([(drafted > 0).sum(), drafted.sum(), accepted.sum()])

    def observe_logits(self, best: torch.Tensor, is_drafted: torch.Tensor) -> None:
        """Count drafted rows whose largest logit is not finite, [Q] each. May be captured."""
        self._not_finite += (~torch.isfinite(best) & is_drafted).sum()

    def clear(self) -> None:
        """Count from zero again, in place: captured graphs count here."""
        self._verified.zero_()
        self._not_finite.zero_()

    def verifications(self) -> tuple[int, int, int]:
        """Verified blocks, their drafts, and how many of those were accepted. Waits."""
        blocks, drafts, accepted = self._verified.tolist()
        return blocks, drafts, accepted

    def nan_drafts(self) -> int:
        """Drafts whose logits were not finite. Waits."""
        return int(self._not_finite.item())
