"""Operators of vLLM's CUDA build that its CPU build lacks, or has with fewer inputs."""

from __future__ import annotations

from typing import Any

import torch

from emulated import torch_cuda

_libraries: list[Any] = []


def define() -> None:
    """Define the operators. Import vLLM's CPU kernels first: they define the operators' names."""
    views = torch.library.Library("_C", "FRAGMENT")
    views.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
    views.define("weak_ref_tensor(Tensor input) -> Tensor")
    device = torch_cuda.device()
    views.impl("get_cuda_view_from_cpu_tensor", device.device_view, "CPU")
    views.impl("weak_ref_tensor", device.weak_view, "CUDA")
    norms = torch.library.Library("_C", "IMPL")
    norms.impl("rms_norm", _rms_norm, "CUDA")
    norms.impl("fused_add_rms_norm", _fused_add_rms_norm, "CUDA")
    _libraries.extend((views, norms))
    # The CPU build has this name, but it accepts no input.
    from vllm import _custom_ops

    _custom_ops.scaled_fp8_quant = _scaled_fp8_quant


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the normed `x`, of any strides; a 2-D weight has a row for each outermost group."""
    wide = x.float()
    found = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return found
    if weight.dim() == 2:
        weight = weight.view(weight.shape[0], *[1] * (x.dim() - 2), weight.shape[1])
    return found * weight.float()


def _rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    out.copy_(_normed(x, weight, eps))


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> None:
    residual.add_(x)
    x.copy_(_normed(residual, weight, eps))


def _scaled_fp8_quant(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    *,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise by one given scale, as for the queries of an 8-bit cache."""
    if scale is None or scale.numel() != 1 or any(others.values()):
        raise NotImplementedError("the emulated device quantises by one given scale alone")
    kind = torch.float8_e4m3fn
    most = torch.finfo(kind).max
    found = (x.float() / scale).clamp(-most, most).to(kind)
    if output is None:
        return found, scale
    output.copy_(found)
    return output, scale
