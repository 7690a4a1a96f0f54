"""Writes the context's keys and values, made from the target's features, to the drafter's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.model.layers import BlockAttention


class ContextProjection(nn.Module):
    """Fuse the taps, project them to K/V of all layers in one GEMM, and store them.

    Runs over every token that was not rejected, at once or when its context is needed, so it
    consists of a few fused operations. It is not compiled, because its number of rows is unrelated
    to the block's.
    """

    def __init__(self, spec: DrafterSpec, quantisation: QuantizationConfig | None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
        self.value_scale = spec.value_scale
        self.fc = ReplicatedLinear(
            len(spec.taps) * spec.target_hidden_size,
            spec.hidden_size,
            bias=False,
            return_bias=False,
            quant_config=quantisation,
            prefix="fc",
        )
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.attentions: list[BlockAttention] = []  # a plain list: they belong to the block

    def fuse_layers(self, attentions: list[BlockAttention]) -> None:
        """Stack the layers' K and V projections and K norms; call after the weights are loaded."""
        self.attentions = attentions
        # One GEMM makes K and V. On CUDA, the norm reads the K half of its rows with each layer's
        # own weight. The CPU's norm takes one weight and contiguous rows: given a half, it would
        # read V as K.
        self.has_grouped_norm = not current_platform.is_cpu()
        self.kv_weight: torch.Tensor | None = None
        self.kv_bias: torch.Tensor | None = None
        methods = [a.qkv_proj.quant_method for a in attentions]
        if all(isinstance(method, UnquantizedLinearMethod) for method in methods):
            self.kv_weight = self._stack([a.qkv_proj.weight for a in attentions])  # [2 * L * kv, H]
            if attentions[0].qkv_proj.bias is not None:
                self.kv_bias = self._stack([a.qkv_proj.bias for a in attentions])
        self.k_norm_weight = torch.stack([a.k_norm.weight.data for a in attentions])  # [L, D]

    def _stack(self, projections: list[torch.Tensor]) -> torch.Tensor:
        """K of all layers, then V of all; each layer's projection holds q, k and v, in order."""
        sizes = [self.attentions[0].q_size] + [self.attentions[0].kv_size] * 2
        _, k, v = zip(*(projection.data.split(sizes) for projection in projections), strict=True)
        return torch.cat([*k, *v])

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Fused and normed Z, [C, H], of features [C, m * H_target]; once for all layers."""
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
        k, v = self._keys_and_values(z)
        if self.value_scale is not None:
            v.mul_(self.value_scale)
        if self.has_grouped_norm:
            k = k.transpose(0, 1)  # the norm's groups are its outermost entries
            normed = k.new_empty(k.shape)
            ops.rms_norm(normed, k, self.k_norm_weight, self.eps)
            self._rotate(positions.repeat(len(normed)), normed.flatten(0, 1))
            return normed.transpose(0, 1), v
        k = k.contiguous()
        normed = torch.empty_like(k)
        ops.rms_norm(normed, k, None, self.eps)
        normed.mul_(self.k_norm_weight[:, None])
        # The rotation treats L layers of kv_heads as L * kv_heads heads of one token.
        self._rotate(positions, normed.flatten(1, 2))
        return normed, v

    def _keys_and_values(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Projected rows, [C, L, kv_heads, D] each; views of wider rows if one GEMM made both."""
        if self.kv_weight is None:
            # Quantised weights need their own kernel, which also computes the unused queries.
            layers = [
                a.qkv_proj(z)[0].split([a.q_size, a.kv_size, a.kv_size], dim=-1)
                for a in self.attentions
            ]
            _, keys, values = zip(*layers, strict=True)
            heads = (-1, self.head_dim)
            return tuple(torch.stack(part, 1).unflatten(-1, heads) for part in (keys, values))
        k, v = F.linear(z, self.kv_weight, self.kv_bias).chunk(2, dim=-1)
        shape = (len(self.attentions), -1, self.head_dim)
        return k.unflatten(-1, shape), v.unflatten(-1, shape)

    def _rotate(self, positions: torch.Tensor, keys: torch.Tensor) -> None:
        """Rotate keys [N, heads, D] in place; positions are [N]. All layers share one rotation."""
        rotary = self.attentions[0].rotary_emb
        ops.rotary_embedding(
            positions,
            keys.view(len(keys), keys.shape[1] * self.head_dim),  # a copy would lose the result
            None,
            self.head_dim,
            rotary._match_cos_sin_cache_dtype(keys),
            rotary.is_neox_style,
        )

    def store(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the context K/V of C rows to their slots, [C] int64; slot -1 writes nothing.

        `features`: taps concatenated in ascending layer order, [C, m * H_target].
        """
        self.store_fused(self.fuse(features), positions, [slots] * len(self.attentions))

    def store_fused(
        self, z: torch.Tensor, positions: torch.Tensor, slots: Sequence[torch.Tensor]
    ) -> None:
        """Write fused rows [C, H] to the slots of each layer's cache group, [C] int64 each."""
        keys, values = self.project(z, positions)
        layers = zip(self.attentions, keys.unbind(1), values.unbind(1), slots, strict=True)
        for attention, k, v, layer_slots in layers:
            attn = attention.attn
            attn.impl.do_kv_cache_update(attn, k, v, attn.kv_cache, layer_slots)
