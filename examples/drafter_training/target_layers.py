"""Layers of a Llama or a Gemma 3, turned into layers of a drafter, which are Qwen3's.

A drafter norms its context once, for all layers, so a layer's own norm moves into the weights after
it. Queries and keys are normed, which a Llama does not do: to about their old size. What Gemma does
and a drafter cannot becomes weights that do nearly the same:

- its norms multiply by 1 + weight;
- it norms what attention and MLP add to the residual stream: divided by its usual size instead;
- its MLP has GELU: SiLU of 1.702 times the input, divided by 1.702, is that to within 0.021.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3RMSNorm

from vllm_dflash.checkpoint.spec import DrafterSpec

GELU_AS_SILU = 1.702
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
"""Gemma's norms of what attention and MLP return."""


def factor_of(norm: Any) -> torch.Tensor:
    """Return what a norm multiplies the channels by, [H]."""
    weight: torch.Tensor = norm.weight.detach()
    return 1 + weight if isinstance(norm, Gemma3RMSNorm) else weight


@torch.no_grad()
def sizes_before_norms(
    target: PreTrainedModel, layers: list[nn.Module], text: list[int]
) -> dict[nn.Module, float]:
    """Return the usual size of what Gemma's layers norm before they add it, in this text."""
    sizes: dict[nn.Module, float] = {}

    def see(norm: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        # The median: the first token's values are many times larger.
        sizes[norm] = given[0][0].square().mean(-1).sqrt().median().item()  # [1, T, H]

    gemmas = [layer for layer in layers if isinstance(layer, Gemma3DecoderLayer)]
    norms = [getattr(layer, name) for layer in gemmas for name in AFTER]
    if norms:
        hooks = [norm.register_forward_pre_hook(see) for norm in norms]
        target.model(torch.tensor([text]))
        for hook in hooks:
            hook.remove()
    return sizes


def as_drafter_layer(
    like: Any, spec: DrafterSpec, sizes: dict[nn.Module, float]
) -> dict[str, torch.Tensor]:
    """Return the weights of a drafter's layer that starts as this one of the target's."""
    weights = {name: one for name, one in like.state_dict().items() if "_proj." in name}
    scale = factor_of(like.input_layernorm)
    for name in ("q", "k", "v"):
        weights[f"self_attn.{name}_proj.weight"] = weights[f"self_attn.{name}_proj.weight"] * scale
    for name in ("q", "k"):
        if norm := getattr(like.self_attn, f"{name}_norm", None):
            weights[f"self_attn.{name}_norm.weight"] = factor_of(norm)
            continue
        rows = weights[f"self_attn.{name}_proj.weight"].unflatten(0, (-1, spec.head_dim))
        size = rows.square().sum(-1).mean().sqrt()
        weights[f"self_attn.{name}_norm.weight"] = size.expand(spec.head_dim)
    before_mlp = like.post_attention_layernorm
    if isinstance(like, Gemma3DecoderLayer):
        before_mlp = like.pre_feedforward_layernorm
        for name, after in zip(("self_attn.o_proj", "mlp.down_proj"), AFTER, strict=True):
            norm = getattr(like, after)
            factor = factor_of(norm) / sizes[norm]
            weights[f"{name}.weight"] = weights[f"{name}.weight"] * factor[:, None]
        weights["mlp.gate_proj.weight"] = weights["mlp.gate_proj.weight"] * GELU_AS_SILU
        weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"] / GELU_AS_SILU
    return weights | {
        "input_layernorm.weight": torch.ones_like(scale),
        "post_attention_layernorm.weight": factor_of(before_mlp),
    }
