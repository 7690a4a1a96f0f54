"""DFlash 2: a short convolution along the block, on both sides of a sublayer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from vllm_dflash.checkpoint.spec import DFlash2


class GroupedConvolution(nn.Module):
    """Mixes each row of a block with those before it, by kernels that depend on the row.

    A kernel is the checkpoint's, by channel, plus what is projected from the sublayer's input, by
    group of channels. As in vLLM's `qwen3_dflash2.py`, but for blocks of any width side by side.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: DFlash2,
        quantisation: QuantizationConfig | None,
        *,
        prefix: str,
    ) -> None:
        super().__init__()
        self.shape = (2, spec.conv_kernel_size, hidden_size // spec.conv_group_size)
        kernels = torch.empty(2, spec.conv_kernel_size, hidden_size)  # before and behind
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
        """The sublayer with its input and its output convolved: [Q, H] to [Q, H].

        `offsets`: of each row in its own block, [Q].
        """
        corrections = self.kernel_projection(x).unflatten(-1, self.shape)  # [Q, 2, taps, groups]
        x = convolve(x, corrections[:, 0], self.base_kernel[0], offsets)
        return convolve(sublayer(x), corrections[:, 1], self.base_kernel[1], offsets)


def convolve(
    x: torch.Tensor, corrections: torch.Tensor, base: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Row i becomes the sum over taps t of kernel[i, t] * row i - t, inside its own block.

    Args:
        x: rows of blocks, one block behind another, [Q, H].
        corrections: what each row adds to the kernel, [Q, taps, groups].
        base: the kernel itself, [taps, H].
        offsets: of each row in its own block, [Q].
    """
    groups = corrections.shape[-1]
    kernels = base.unflatten(-1, (groups, -1)) + corrections.unsqueeze(-1)  # [Q, taps, G, H / G]
    rows = x.unflatten(-1, (groups, -1))  # [Q, G, H / G]
    total = kernels[:, 0] * rows
    for tap in range(1, len(base)):
        inside = (offsets >= tap)[:, None, None]
        total = total + kernels[:, tap] * torch.where(inside, rows.roll(tap, dims=0), 0.0)
    return total.flatten(-2)
