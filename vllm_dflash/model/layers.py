"""The drafter's layers, built from vLLM's own."""

from __future__ import annotations

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, replace
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.model.dflash2_layers import GroupedConvolution


class DraftAttentionCache(Attention):
    """vLLM's attention, with a cache that keeps the full context even for sliding-window layers.

    A sliding-window cache group would replace old blocks by the null block and need its own block
    table. The kernel applies the window anyway. A drafter has few layers, so one cache group for
    all of them costs little and lets full and sliding layers mix.
    """

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        spec = super().get_kv_cache_spec(vllm_config)
        if not isinstance(spec, SlidingWindowSpec):
            return spec
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=spec.dtype,
            kv_quant_mode=spec.kv_quant_mode,
        )


class BlockAttention(nn.Module):
    """Attention of the block's rows over the cached context and the block itself.

    The context's keys and values are in the cache before this runs (`ContextProjection`). The
    block's own are written to the slots after the context. They are temporary: context overwrites
    them once the tokens are verified. The attention metadata decides whether it is causal.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        number: int,
        quantisation: QuantizationConfig | None,
        *,
        prefix: str,
    ) -> None:
        super().__init__()
        options = EngineOptions.from_config(vllm_config)
        spec, ranks = options.drafter, options.drafter_ranks
        self.window, self.causal = spec.layer_window(number), spec.causal[number]
        self.head_dim = spec.head_dim
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            spec.head_dim,
            spec.num_heads,
            spec.num_kv_heads,
            bias=spec.attention_bias,
            disable_tp=ranks == 1,
            quant_config=quantisation,
            prefix=f"layers.{number}.self_attn.qkv_proj",
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads  # per rank
        self.q_size, self.kv_size = num_heads * spec.head_dim, num_kv_heads * spec.head_dim
        self.o_proj = RowParallelLinear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.attention_bias,
            disable_tp=ranks == 1,
            quant_config=quantisation,
            prefix=f"layers.{number}.self_attn.o_proj",
        )
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        # The drafter uses the target's positions, however large they get.
        max_position = max(spec.max_position_embeddings, vllm_config.model_config.max_model_len)
        self.rotary_emb = get_rope(
            spec.head_dim,
            max_position=max_position,
            is_neox_style=spec.is_neox_style,
            rope_parameters=dict(spec.rope_parameters),
        )
        self.value_scale = spec.value_scale
        self.attention_sink_bias: nn.Parameter | None = None
        if spec.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.empty(num_heads), requires_grad=False)
            if ranks > 1:
                loader = sharded_weight_loader(0)
                set_weight_attrs(self.attention_sink_bias, {"weight_loader": loader})
        self.attn = DraftAttentionCache(
            num_heads,
            spec.head_dim,
            spec.head_dim**-0.5,
            num_kv_heads=num_kv_heads,
            # vLLM keeps the target's window here if all its layers have one; ours is below.
            cache_config=replace(vllm_config.cache_config, sliding_window=None),
            per_layer_sliding_window=self.window,
            sinks=self.attention_sink_bias,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self.qkv_proj(x)  # [Q, q_size + 2 * kv_size]
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        if self.value_scale is not None:
            v = v * self.value_scale
        out, _ = self.o_proj(self.attn(q, k, v))
        return out  # [Q, H]


class DrafterLayer(nn.Module):
    """One pre-norm layer of the drafter, with vLLM's fused residual norms."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        number: int,
        quantisation: QuantizationConfig | None,
        *,
        prefix: str,
    ) -> None:
        super().__init__()
        options = EngineOptions.from_config(vllm_config)
        spec = options.drafter
        self.self_attn = BlockAttention(
            vllm_config, number, quantisation, prefix=f"{prefix}.self_attn"
        )
        self.mlp = LlamaMLP(
            spec.hidden_size,
            spec.intermediate_size,
            spec.hidden_act,
            quant_config=quantisation,
            disable_tp=options.drafter_ranks == 1,
            prefix=f"layers.{number}.mlp",
        )
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.attention_conv: GroupedConvolution | None = None
        self.mlp_conv: GroupedConvolution | None = None
        if (made := spec.convolutions) is not None:
            self.attention_conv, self.mlp_conv = (
                GroupedConvolution(
                    spec.hidden_size, made, quantisation, prefix=f"layers.{number}.{name}"
                )
                for name in ("attention_conv", "mlp_conv")
            )

    def forward(
        self,
        positions: torch.Tensor,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        if self.attention_conv is None or self.mlp_conv is None:
            x = self.self_attn(positions, x)
            x, residual = self.post_attention_layernorm(x, residual)
            return self.mlp(x), residual
        assert offsets is not None
        x = self.attention_conv(lambda mixed: self.self_attn(positions, mixed), x, offsets)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp_conv(self.mlp, x, offsets), residual


def is_worth_compiling(_: VllmConfig) -> bool:
    """Whether vLLM should compile the drafter if it compiles the target.

    Not on CPUs: the block takes 2% of the time there and is no faster compiled (1.00 times as
    long), while compiling adds 6 to 10 s to the start.
    """
    return not current_platform.is_cpu()


@support_torch_compile(
    dynamic_arg_dims={"x": 0, "positions": 0, "offsets": 0}, enable_if=is_worth_compiling
)
class DraftBlock(nn.Module):
    """All layers and the final norm, compiled together."""

    def __init__(
        self, *, vllm_config: VllmConfig, quantisation: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        spec = EngineOptions.from_config(vllm_config).drafter
        # vLLM keys attention layers by name, so ours are numbered after the target's. Layers that
        # may be quantised are named as in the checkpoint, because its config lists exceptions.
        first = vllm_config.model_config.get_total_num_hidden_layers()
        self.layers = nn.ModuleList(
            DrafterLayer(vllm_config, i, quantisation, prefix=f"{prefix}.layers.{first + i}")
            for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def attentions(self) -> list[BlockAttention]:
        """The attention of each layer, in order."""
        return [module for module in self.modules() if isinstance(module, BlockAttention)]

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states [Q, H] of the blocks' embeddings [Q, H].

        `positions`: in their requests, [Q]; `offsets`: in their own blocks, [Q], for convolutions.
        """
        residual = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual, offsets)
        x, _ = self.norm(x, residual)
        return x
