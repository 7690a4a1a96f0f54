"""Context K/V as computed on CUDA: one GEMM, one norm over all layers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops

from support.cached_drafter import Row, check_logits, features_of
from support.drafter_harness import ProposerHarness
from support.pairs import make_pair
from support.reference_decoding import draft
from vllm_dflash.model import context_projection

SHAPES: dict[str, dict[str, Any]] = {
    "five-layers": {"num_hidden_layers": 5},
    "one-layer": {"num_hidden_layers": 1},
    "biases-and-value-scale": {
        "attention_bias": True,
        "dflash_config": {"attention_value_scale": 0.7},
    },
    "interleaved-rope": {"is_neox_style": False},
    "half-of-each-head-rotated": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        "sliding_window": 20,
        "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
    },
}


def grouped_rms_norm(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> None:
    """vLLM's CUDA kernel with its checks; a weight [L, D] has one row per outermost entry."""
    assert out.is_contiguous()
    assert weight.is_contiguous()
    assert rows.stride(-1) == 1
    if weight.dim() == 2:
        assert rows.dim() in (2, 3, 4)
        assert (weight.size(0), weight.size(1)) == (rows.size(0), rows.size(-1))
        weight = weight.view(len(weight), *[1] * (rows.dim() - 2), -1)
    scale = torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + epsilon)
    out.copy_(rows.float() * scale * weight)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_cuda_stores_what_the_cpu_stores(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is the same, and logits are the reference's; keys and values need no copies."""
    pair = make_pair(tmp_path, **changes)
    features = features_of(pair, 41, seed=0)

    def harness_that_drafted() -> ProposerHarness:
        harness = ProposerHarness(pair)
        harness.step([Row(0, features, bonus=7)])
        return harness

    of_cpu = harness_that_drafted()
    platform = SimpleNamespace(is_cpu=lambda: False)
    kernels = SimpleNamespace(rms_norm=grouped_rms_norm, rotary_embedding=ops.rotary_embedding)
    monkeypatch.setattr(context_projection, "current_platform", platform)
    monkeypatch.setattr(context_projection, "ops", kernels)
    of_cuda = harness_that_drafted()

    for ours, expected in zip(of_cuda.caches, of_cpu.caches, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    expected = draft(
        pair.load_target(), pair.load_drafter(), features, 7, pair.spec.max_draft_tokens
    )
    check_logits(of_cuda.logits, expected)

    context = of_cuda.proposer.model.context
    with torch.inference_mode():
        keys, values = context.project(context.fuse(features), torch.arange(41))
    assert all(of_layer.is_contiguous() for of_layer in keys.unbind(1))
    assert values.stride(0) == 2 * keys[0].numel()  # after each row's keys: no separate GEMM
