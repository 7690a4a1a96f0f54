"""Rotary embedding of the reference: which numbers of a head are turned, and how far."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from vllm_dflash.checkpoint.spec import DrafterSpec


def rotary_of(spec: DrafterSpec, rope: dict[str, Any]) -> Qwen3RotaryEmbedding:
    """What makes cosines and sines of positions, for the part of a head that is rotated."""
    rope = dict(rope)
    part = rope.pop("partial_rotary_factor", None) or 1  # which this class would ignore
    return Qwen3RotaryEmbedding(
        Qwen3Config(
            head_dim=int(spec.head_dim * part),
            rope_parameters=rope,
            max_position_embeddings=spec.max_position_embeddings,
        )
    )


def rotate(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox_style: bool
) -> torch.Tensor:
    """Turn the first numbers of heads [R, heads, T, D], as many as `cos` [R, T, ...] has.

    Pairs are the two halves of them (neox), or neighbouring numbers.
    """
    t, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    if not is_neox_style:
        t = torch.cat([t[..., ::2], t[..., 1::2]], dim=-1)
    t, _ = apply_rotary_pos_emb(t, t, cos, sin)
    if not is_neox_style:
        t = torch.stack(t.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([t, rest], dim=-1)
