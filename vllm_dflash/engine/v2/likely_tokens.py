"""What the drafter thinks of each place of its blocks, kept on the device for who makes trees."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.engine.v2.confidence import CONFIDENCE_ROWS
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.draft_tree import MOST_CANDIDATES


class LikelyTokens:
    """C tokens of each place and their chances; see `planning.draft_tree.Candidates`."""

    def __init__(
        self, most_requests: int, width: int, num_before: int, count: int, device: torch.device
    ) -> None:
        places = most_requests, width
        self._tokens = torch.zeros(*places, count, dtype=torch.int64, device=device)
        self._chances = torch.zeros(*places, num_before, count, device=device)  # [R, K, P, C]

    @classmethod
    def of(
        cls, spec: DrafterSpec, vocab_size: int, size: tuple[int, int], device: torch.device
    ) -> LikelyTokens:
        """For a drafter's blocks; `size`: requests at most, and K."""
        if spec.dflash2 is not None:
            count = spec.dflash2.selector_top_k
            return cls(*size, count, count, device)
        return cls(*size, 1, min(MOST_CANDIDATES, vocab_size), device)

    def buffers(self) -> list[torch.Tensor]:
        """What captured graphs write."""
        return [self._tokens, self._chances]

    def write(
        self, logits: torch.Tensor, target_ids: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Of the rows of R blocks, [R * K, V]. May be captured.

        Args:
            logits: over the drafter's vocabulary.
            target_ids: columns of these to token ids.
        """
        tokens = self._tokens.flatten(0, 1)
        chances = self._chances.flatten(0, 2)  # P is 1
        for start in range(0, len(logits), CONFIDENCE_ROWS):
            rows = slice(start, min(start + CONFIDENCE_ROWS, len(logits)))
            some = logits[rows].float()
            likely, ids = some.topk(tokens.shape[-1], dim=-1)
            tokens[rows] = target_ids(ids)
            chances[rows] = torch.exp(likely - some.logsumexp(dim=-1, keepdim=True)).nan_to_num(0.0)

    def write_pairs(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        """Of R blocks of DFlash 2: [R, K, C], and behind each before it [R, K, C, C]."""
        self._tokens[: len(tokens)] = tokens
        self._chances[: len(tokens)] = scores.float().softmax(dim=-1).nan_to_num(0.0)

    def read(self, requests: Ints, width: int) -> tuple[Ints, Floats]:
        """Of some blocks, [D, w, C] and [D, w, P, C]."""
        rows = torch.from_numpy(requests).to(self._tokens.device)
        return (
            self._tokens[rows, :width].cpu().numpy(),
            self._chances[rows, :width].double().cpu().numpy(),
        )
