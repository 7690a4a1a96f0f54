"""DFlash 2: which of a place's likeliest tokens follows best on the one before it."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_dflash.checkpoint.spec import DFlash2


class CandidateSelector(nn.Module):
    """Scores every candidate of a place behind every candidate of the place before.

    The score of successor c behind predecessor p is c's logit plus the product of both tokens'
    codes, weighed by the row's hidden state. As in vLLM's `qwen3_dflash2.py`.
    """

    def __init__(self, vocab_size: int, hidden_size: int, spec: DFlash2) -> None:
        super().__init__()
        self.top_k = spec.selector_top_k
        codes = vocab_size, spec.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(codes), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.empty(codes), requires_grad=False)
        self.hidden_projection = ReplicatedLinear(
            hidden_size,
            spec.selector_rank,
            bias=False,
            return_bias=False,
            prefix="candidate_selector.hidden_projection",
        )

    def forward(
        self,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
    ) -> torch.Tensor:
        """Scores [D, w, C before, C]; before the first place, all C are the bonus token.

        Args:
            candidates: token ids of w places in D blocks, [D, w, C].
            logits: theirs, [D, w, C].
            hidden: of the rows, [D, w, H].
            bonus: each block's first token, [D].
        """
        first = bonus[:, None, None].expand(-1, 1, self.top_k)
        before = torch.cat([first, candidates[:, :-1]], dim=1)  # [D, w, C]
        weights = self.hidden_projection(hidden)[:, :, None]  # [D, w, 1, r]
        predecessors = self.predecessor_codebook[before] * weights
        successors = self.successor_codebook[candidates]
        return logits[:, :, None] + predecessors @ successors.transpose(-1, -2)


def walk(candidates: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From each bonus token to the best successor, from that to its best, and so on.

    Args:
        candidates: [D, w, C].
        scores: of `CandidateSelector`, [D, w, C before, C].

    Returns:
        Tokens, and the probability of each among the candidates, given the one before: [D, w] each.
    """
    blocks = torch.arange(len(scores), device=scores.device)
    chosen = torch.zeros_like(blocks)
    tokens, confidence = [], []
    for place in range(scores.shape[1]):
        given = scores[blocks, place, chosen].float()  # [D, C]
        best, chosen = given.max(dim=-1)
        tokens.append(candidates[blocks, place, chosen])
        confidence.append(torch.exp(best - given.logsumexp(dim=-1)))
    return torch.stack(tokens, dim=1), torch.stack(confidence, dim=1)
