"""From the target's hidden states to every drafter layer's keys and values in the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.drafter.layers import BlockAttention


class ContextProjection(nn.Module):
    """Fuse the taps, project them to K/V of all layers in one GEMM, and store them.

    Runs on every step over every scheduled token, whether anything is drafted or not, so it is
    kept to a handful of fused operations; it is not compiled, since its number of rows has
    nothing to do with the block's.
    """

    def __init__(self, spec: DrafterSpec, *, prefix: str) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.eps = spec.rms_norm_eps
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
        """Stack the layers' K/V projections; call once the weights are loaded."""
        self.attentions = attentions
        # The rows behind q of every layer: [L * 2 * kv_size, H] and [L * 2 * kv_size].
        self.kv_weight = torch.cat([a.qkv_proj.weight.data[a.q_size :] for a in attentions])
        self.kv_bias = None
        if attentions[0].qkv_proj.bias is not None:
            self.kv_bias = torch.cat([a.qkv_proj.bias.data[a.q_size :] for a in attentions])

    def project(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of C context rows for all L layers.

        Args:
            features: taps concatenated in ascending layer order, [C, m * H].
            positions: absolute position of each row, [C] int64.

        Returns:
            Normed and rotated keys, and values: [L, C, kv_heads, D] each.
        """
        fused = self.fc(features)  # [C, H]
        z = torch.empty_like(fused)
        ops.rms_norm(z, fused, self.hidden_norm.weight.data, self.eps)
        num_rows, num_layers = len(features), len(self.attentions)
        kv = F.linear(z, self.kv_weight, self.kv_bias)  # [C, L * 2 * kv_size]
        kv = kv.view(num_rows, num_layers, 2, -1, self.head_dim)
        k, v = kv.permute(2, 1, 0, 3, 4).contiguous()  # [L, C, kv_heads, D] each
        normed = torch.empty_like(k)
        # Layer by layer: vLLM's CPU kernel takes one weight row, whatever it is given.
        for layer, attention in enumerate(self.attentions):
            ops.rms_norm(normed[layer], k[layer], attention.k_norm.weight.data, self.eps)
        rotary = self.attentions[0].rotary_emb
        cos_sin = rotary._match_cos_sin_cache_dtype(normed)
        rotated = normed.view(num_layers * num_rows, -1)
        ops.rotary_embedding(
            positions.repeat(num_layers), rotated, None, self.head_dim, cos_sin, rotary.is_neox_style
        )
        return normed, v

    def store(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write the context K/V of C rows to their slots [C] int64; a slot of -1 writes nothing."""
        k, v = self.project(features, positions)
        for layer, attention in enumerate(self.attentions):
            attn = attention.attn
            attn.impl.do_kv_cache_update(attn, k[layer], v[layer], attn.kv_cache, slots)
