"""From the target's hidden states to every drafter layer's keys and values in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.model.layers import BlockAttention


class ContextProjection(nn.Module):
    """Fuse the taps, project them to K/V of all layers in one GEMM, and store them.

    Runs over every token that was not rejected, at once or when its context is needed, so it is
    kept to a handful of fused operations; it is not compiled, since its number of rows has
    nothing to do with the block's.
    """

    def __init__(self, spec: DrafterSpec, *, prefix: str) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        self.value_scale = spec.value_scale
        self.fc = ReplicatedLinear(
            len(spec.taps) * spec.target_hidden_size,
            spec.hidden_size,
            bias=False,
            return_bias=False,
            prefix=f"{prefix}.fc",
        )
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.attentions: list[BlockAttention] = []  # a plain list: they belong to the block

    def fuse_layers(self, attentions: list[BlockAttention]) -> None:
        """Stack the layers' K and V projections and K norms; call once the weights are loaded."""
        self.attentions = attentions
        # [L * kv_size, H] each: behind q in every layer's stacked projection come k, then v.
        self.k_weight, self.v_weight = self._stack([a.qkv_proj.weight for a in attentions])
        self.k_bias: torch.Tensor | None = None
        self.v_bias: torch.Tensor | None = None
        if attentions[0].qkv_proj.bias is not None:
            self.k_bias, self.v_bias = self._stack([a.qkv_proj.bias for a in attentions])
        self.k_norm_weight = torch.stack([a.k_norm.weight.data for a in attentions])[:, None]

    def _stack(self, projections: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [self.attentions[0].q_size] + [self.attentions[0].kv_size] * 2
        _, k, v = zip(*(projection.data.split(sizes) for projection in projections), strict=True)
        return torch.cat(k), torch.cat(v)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The taps' common representation Z: [C, m * H_target] to [C, H], normed once for all."""
        fused = self.fc(features)
        z = torch.empty_like(fused)
        ops.rms_norm(z, fused, self.hidden_norm.weight, self.eps)
        return z

    def project(
        self, z: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of C context rows for all L layers.

        Args:
            z: fused rows, [C, H].
            positions: absolute position of each row, [C] int64.

        Returns:
            Normed and rotated keys, and values: [C, L, kv_heads, D] each.
        """
        shape = (len(z), len(self.attentions), -1, self.head_dim)
        k = F.linear(z, self.k_weight, self.k_bias).view(shape)
        v = F.linear(z, self.v_weight, self.v_bias).view(shape)
        if self.value_scale is not None:
            v.mul_(self.value_scale)
        normed = torch.empty_like(k)
        # The layers' norm weights differ, and vLLM's CPU kernel takes only one: norm, then scale.
        ops.rms_norm(normed, k, None, self.eps)
        normed.mul_(self.k_norm_weight)
        rotary = self.attentions[0].rotary_emb
        # To the rotation, L layers of kv_heads are L * kv_heads heads of one token.
        ops.rotary_embedding(
            positions,
            normed.flatten(1),
            None,
            self.head_dim,
            rotary._match_cos_sin_cache_dtype(normed),
            rotary.is_neox_style,
        )
        return normed, v

    def store(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the context K/V of C rows to their slots [C] int64; a slot of -1 writes nothing.

        Features are taps concatenated in ascending layer order, [C, m * H_target].
        """
        self.store_fused(self.fuse(features), positions, [slots] * len(self.attentions))

    def store_fused(
        self, z: torch.Tensor, positions: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> None:
        """The same for fused rows [C, H], with the slots of each layer's own cache group."""
        keys, values = self.project(z, positions)
        layers = zip(self.attentions, keys.unbind(1), values.unbind(1), slots, strict=True)
        for attention, k, v, layer_slots in layers:
            attn = attention.attn
            attn.impl.do_kv_cache_update(attn, k, v, attn.kv_cache, layer_slots)
