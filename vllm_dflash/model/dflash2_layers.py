"""DFlash 2's additions: a convolution along the block, and a walk that chooses its tokens.

Same as vLLM's `qwen3_dflash2.py`, except that blocks of any width can be in one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_dflash.checkpoint.spec import DFlash2, LiLiCorr

if TYPE_CHECKING:
    from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector


class GroupedConvolution(nn.Module):
    """Mixes each row of a block with earlier rows, by kernels that depend on the row.

    A kernel is the checkpoint's base, per channel, plus a correction projected from the sublayer's
    input, per group of channels.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: DFlash2 | LiLiCorr,
        quantisation: QuantizationConfig | None,
        *,
        prefix: str,
    ) -> None:
        super().__init__()
        self.shape = (2, spec.conv_kernel_size, hidden_size // spec.conv_group_size)
        kernels = torch.empty(2, spec.conv_kernel_size, hidden_size)  # before and after
        self.base_kernel = nn.Parameter(kernels, requires_grad=False)
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * spec.conv_kernel_size * self.shape[2],
            bias=False,
            quant_config=quantisation,
            return_bias=False,
            prefix=f"{prefix}.kernel_projection",
        )

    def forward(
        self,
        sublayer: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        offsets: torch.Tensor,
    ) -> torch.Tensor:
        """Run the sublayer with its input and output convolved: [Q, H] to [Q, H].

        `offsets`: index of each row in its own block, [Q].
        """
        corrections = self.kernel_projection(x).unflatten(-1, self.shape)  # [Q, 2, taps, groups]
        x = convolve(x, corrections[:, 0], self.base_kernel[0], offsets)
        return convolve(sublayer(x), corrections[:, 1], self.base_kernel[1], offsets)


def convolve(
    x: torch.Tensor, corrections: torch.Tensor, base: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Replace row i by the sum over taps t of kernel[i, t] * row[i - t], inside its own block.

    Args:
        x: rows of consecutive blocks, [Q, H].
        corrections: what each row adds to the kernel, [Q, taps, groups].
        base: the kernel itself, [taps, H].
        offsets: index of each row in its own block, [Q].
    """
    groups = corrections.shape[-1]
    kernels = base.unflatten(-1, (groups, -1)) + corrections.unsqueeze(-1)  # [Q, taps, G, H / G]
    rows = x.unflatten(-1, (groups, -1))  # [Q, G, H / G]
    total = kernels[:, 0] * rows
    for tap in range(1, len(base)):
        inside = (offsets >= tap)[:, None, None]
        total = total + kernels[:, tap] * torch.where(inside, rows.roll(tap, dims=0), 0.0)
    return total.flatten(-2)


def make_selector(hidden_size: int, vocab_size: int, spec: DFlash2) -> CandidateSelector:
    """vLLM's module that scores every candidate of a position after every candidate of the position
    before, without its weights.

    Scores are [D, w, C before, C] for w positions of D blocks; before the first position, all C are
    the bonus token.
    """
    # Imported here because the front end imports this module; see `lilicorr_head.py`.
    from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector

    selector = CandidateSelector(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        rank=spec.selector_rank,
        top_k=spec.selector_top_k,
        params_dtype=torch.get_default_dtype(),
        prefix="candidate_selector",
    )
    selector.do_not_compile = True  # it would be compiled for each width of V1's blocks
    return selector


def walk(candidates: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best successor of each bonus token, then the best successor of that, and so on.

    Args:
        candidates: token ids, [D, w, C].
        scores: of each candidate after each of the position before, [D, w, C before, C].

    Returns:
        Tokens, and the probability of each among the candidates, given the one before: [D, w] each.
    """
    blocks = torch.arange(len(scores), device=scores.device)
    chosen = torch.zeros_like(blocks)
    tokens, confidence = [], []
    for position in range(scores.shape[1]):
        given = scores[blocks, position, chosen].float()  # [D, C]
        best, chosen = given.max(dim=-1)
        tokens.append(candidates[blocks, position, chosen])
        confidence.append(torch.exp(best - given.logsumexp(dim=-1)))
    return torch.stack(tokens, dim=1), torch.stack(confidence, dim=1)
