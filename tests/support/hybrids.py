"""Run targets with linear attention without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.utils import is_torchvision_available
from vllm.platforms import current_platform


class _Anything(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def know_qwen35() -> None:
    """Register Qwen3.5's text model in vLLM. Its file imports torchvision for images.

    PyPI has torchvision for CUDA only, whose operators a CPU build of torch does not accept.
    """
    assert not is_torchvision_available()  # it remembers this
    names = ["torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.v2"]
    with pytest.MonkeyPatch.context() as patch:
        for name in [*names, "torchvision.transforms.v2.functional"]:
            patch.setitem(sys.modules, name, module := _Anything(name))
            module.__spec__ = ModuleSpec(name, None)
        from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)


@contextmanager
def kernels_for_gpus() -> Iterator[None]:
    """Run gated delta nets with vLLM's kernels for GPUs, in float32; those for CPUs take bfloat16.

    Prompts use others (`kernels_for_prompts`).
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn

    kind = gdn.QwenGatedDeltaNetAttention
    build = kind.__init__

    def build_for_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self._forward_method = self.forward_cuda

    with pytest.MonkeyPatch.context() as patch, kernels_for_prompts():
        patch.setattr(kind, "__init__", build_for_gpu)
        update = _convolutions_for_gpus().causal_conv1d_update
        patch.setattr(gdn, "causal_conv1d_update", update)
        yield


@contextmanager
def kernels_for_prompts() -> Iterator[None]:
    """Run prompts with a loop in place of a kernel that refuses float32, and with vLLM's
    convolution for CPUs in place of one that the interpreter cannot run."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent
    from vllm.triton_utils import tl

    with pytest.MonkeyPatch.context() as patch:
        # Separate names for functions of Triton's language, which the interpreter replaces.
        patch.setattr(fused_recurrent, "exp", lambda x: tl.exp(x))
        patch.setattr(fused_recurrent, "log", lambda x: tl.log(x))
        patch.setattr(gdn, "causal_conv1d_fn", causal_conv1d_fn_cpu)
        for name in ("forward_native", "forward_cuda"):
            patch.setattr(gdn.ChunkGatedDeltaRule, name, _token_by_token)
        yield


@cache
def _convolutions_for_gpus() -> ModuleType:
    """Return vLLM's module as it is on other platforms; on CPUs it replaces its functions."""
    spec = find_spec("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_cpu", lambda self: False)
        spec.loader.exec_module(module)
    return module


def _token_by_token(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run prompts one after another, [1, T, heads, D]; a state of each, [R, heads, D, D]."""
    groups = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(groups, 2) * k.shape[-1] ** -0.5
    k = k.repeat_interleave(groups, 2)
    out, states = torch.empty_like(v), initial_state.float().clone()
    for state, (start, end) in zip(states, pairwise(cu_seqlens.tolist()), strict=True):
        for i in range(start, end):
            state.mul_(g[0, i].exp()[:, None, None])
            change = (v[0, i] - torch.einsum("hvk,hk->hv", state, k[0, i])) * beta[0, i, :, None]
            state.add_(torch.einsum("hv,hk->hvk", change, k[0, i]))
            out[0, i] = torch.einsum("hvk,hk->hv", state, q[0, i])
    return out, states
