"""DFlash 2's additions in plain PyTorch: convolutions along the block, and a walk along candidates.

R blocks of Q rows, H hidden size, G groups of channels, t rows read by a kernel, C candidates for
each of w positions, codes of r numbers.

    around attention and MLP:  kernel[i] = base + W_k x[i], by group of channels
                               y[i] = sum over j < t of kernel[i, j] * x[i - j], inside the block
    the walk, from the bonus token on:
        score(c | p) = logit(c) + sum over r of P[p] * (W_h hidden) * S[c]
        the next token is the best successor c of the token p before it, among C candidates
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm_dflash.checkpoint.spec import DFlash2, LiLiCorr


class ReferenceConvolution(nn.Module):
    """Convolutions before and after a sublayer; the first one's input makes both kernels."""

    def __init__(self, hidden_size: int, spec: DFlash2 | LiLiCorr) -> None:
        super().__init__()
        self.rows, self.group = spec.conv_kernel_size, spec.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.rows, hidden_size))
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0  # the identity, before training
        groups = hidden_size // self.group
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.rows * groups, bias=False)

    def forward(
        self, sublayer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, width: int
    ) -> torch.Tensor:
        """[R, Q, H] to [R, Q, H], in consecutive blocks of `width` rows."""
        before, behind = self.kernel_projection(x).chunk(2, dim=-1)  # [R, Q, t * G] each
        return self.convolve(sublayer(self.convolve(x, before, 0, width)), behind, 1, width)

    def convolve(
        self, x: torch.Tensor, correction: torch.Tensor, side: int, width: int
    ) -> torch.Tensor:
        """Convolve with the kernel of one side (0: before, 1: after) plus each row's correction."""
        added = correction.unflatten(-1, (self.rows, -1)).repeat_interleave(self.group, dim=-1)
        kernel = self.base_kernel[side] + added  # [R, Q, t, H]
        blocks = x.unflatten(1, (-1, width))  # [R, blocks, width, H]
        total = torch.zeros_like(x)
        for back in range(min(self.rows, width)):
            earlier = torch.zeros_like(blocks)
            earlier[:, :, back:] = blocks[:, :, : width - back]
            total = total + kernel[:, :, back] * earlier.flatten(1, 2)
        return total


class ReferenceSelector(nn.Module):
    """Chooses each position's token among candidates, given the token before it."""

    def __init__(self, vocab_size: int, hidden_size: int, spec: DFlash2) -> None:
        super().__init__()
        self.top_k = spec.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, spec.selector_rank))
        self.successor_codebook = nn.Parameter(torch.randn(vocab_size, spec.selector_rank) * 0.02)
        self.hidden_projection = nn.Linear(hidden_size, spec.selector_rank, bias=False)

    def scores(
        self,
        candidates: torch.Tensor,  # [..., C]
        logits: torch.Tensor,  # [..., C]
        hidden: torch.Tensor,  # [..., H]
        before: torch.Tensor,  # [...]
    ) -> torch.Tensor:
        """Scores [..., C] of candidates after the token `before`."""
        weights = self.predecessor_codebook[before] * self.hidden_projection(hidden)  # [..., r]
        return logits + (self.successor_codebook[candidates] * weights[..., None, :]).sum(-1)

    def walk(
        self, logits: torch.Tensor, hidden: torch.Tensor, bonus: int
    ) -> tuple[list[int], list[float]]:
        """Tokens of one block, and the probability of each among its candidates.

        Args:
            logits: logits of the whole vocabulary, [w, V].
            hidden: hidden states, [w, H].
            bonus: the token before the first position.
        """
        tokens, confidence = [], []
        token = bonus
        for row, state in zip(logits, hidden, strict=True):
            most_likely = row.topk(self.top_k)
            scores = self.scores(
                most_likely.indices,
                most_likely.values,
                state,
                torch.tensor(token, device=row.device),
            )
            token = int(most_likely.indices[scores.argmax()])
            tokens.append(token)
            confidence.append(float(scores.float().softmax(-1).max()))
        return tokens, confidence
