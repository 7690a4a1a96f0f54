"""DFlash in plain PyTorch: the method written to be read, and the oracle of the tests.

A drafter proposes a whole block of tokens in one forward pass (arXiv 2602.06036). Names:
B block size, K = B - 1 drafted tokens, m taps, H hidden size, C context rows, Q query rows.

    Z = RMSNorm(W_fc . concat(taps of the target))        context, shared by all layers
    X = E_target[bonus, mask x K]                         the block
    per layer:  X += attention(Q(X), K/V of [Z; X]);  X += MLP(X)
    drafts = argmax(head_target(RMSNorm(X)[1:]))          a mask row predicts its own position
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from vllm_dflash.checkpoint.spec import DrafterSpec


class BlockAttention(nn.Module):
    """Queries of the block over the context's and the block's own keys and values."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.attention_bias)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = Qwen3RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,  # [R, Q, H]
        z: torch.Tensor,  # [R, C, H]
        rope: tuple[torch.Tensor, torch.Tensor],  # cos, sin: [R, C + Q, D]
        visible: torch.Tensor,  # [R, 1, Q, C + Q] bool
    ) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (-1, self.head_dim))  # [R, T, heads, D]

        rows = torch.cat([z, x], dim=1)  # [R, C + Q, H]
        q = self.q_norm(heads(self.q_proj(x))).transpose(1, 2)  # [R, heads, Q, D]
        k = self.k_norm(heads(self.k_proj(rows))).transpose(1, 2)  # [R, kv, C + Q, D]
        v = heads(self.v_proj(rows)).transpose(1, 2)
        cos, sin = rope
        num_queries = x.shape[1]
        q, _ = apply_rotary_pos_emb(q, q, cos[:, -num_queries:], sin[:, -num_queries:])
        k, _ = apply_rotary_pos_emb(k, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # [R, Q, H]


class DrafterLayer(nn.Module):
    """One layer of the drafter. The context is not normed per layer; the block is."""

    def __init__(self, spec: DrafterSpec, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = BlockAttention(spec)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), z, rope, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class ReferenceDrafter(nn.Module):
    """A DFlash drafter whose parameters carry the names of the z-lab checkpoints."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.spec = spec
        config = Qwen3Config(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_attention_heads=spec.num_heads,
            head_dim=spec.head_dim,
            hidden_act=spec.hidden_act,
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters=dict(spec.rope_parameters),
            max_position_embeddings=spec.max_position_embeddings,
        )
        fused = len(spec.taps) * spec.target_hidden_size
        self.fc = nn.Linear(fused, spec.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(spec, config) for _ in range(spec.num_layers))
        self.norm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)

    @classmethod
    def load(cls, spec: DrafterSpec, folder: str | Path) -> ReferenceDrafter:
        """Load every `*.safetensors` of a folder, strictly, in the file's own dtype."""
        drafter = cls(spec)
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
        drafter.load_state_dict(tensors, strict=True)
        return drafter.eval()

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Z: fuse the taps, concatenated in ascending layer order. [..., m * H] -> [..., H]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        block: torch.Tensor,  # [R, Q, H] embeddings
        context: torch.Tensor,  # [R, C, H], from `context`
        positions: torch.Tensor,  # [R, C + Q]
        visible: torch.Tensor | None = None,  # [R, 1, Q, C + Q] bool
    ) -> torch.Tensor:
        """Return the normed hidden states of the block, [R, Q, H].

        `visible` says which keys a query may see besides the layer's own window and causality;
        None means all of them (one block behind its whole context).
        """
        num_queries = block.shape[1]
        if visible is None:
            shape = (block.shape[0], 1, num_queries, positions.shape[1])
            visible = torch.ones(shape, dtype=torch.bool, device=block.device)
        rope = self.rotary(block, positions)
        q_pos, k_pos = positions[:, None, -num_queries:, None], positions[:, None, None, :]
        for layer, window, causal in zip(
            self.layers, self.spec.windows, self.spec.causal, strict=True
        ):
            seen = visible
            if causal:
                seen = seen & (k_pos <= q_pos)
            if window is not None:
                seen = seen & (q_pos - k_pos < window)
                if not causal:
                    seen = seen & (k_pos - q_pos < window)
            block = layer(block, context, rope, seen)
        return self.norm(block)


@dataclass
class Generation:
    """What `generate` returns."""

    tokens: list[int]
    """New tokens, the prompt's not included."""
    acceptance_lengths: list[int]
    """Tokens each verify step produced, its bonus token included; drafted steps only."""


@torch.inference_mode()
def target_step(
    target: PreTrainedModel, token_ids: torch.Tensor, cache: DynamicCache, taps: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target over new tokens [1, T]. Returns logits [T, V] and features [T, m * H]."""
    # Hooks, since Hugging Face norms the last entry of `hidden_states`, and taps are not normed.
    outputs: dict[int, torch.Tensor] = {}

    def keep(tap: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs[tap] = output[0] if isinstance(output, tuple) else output

    layers = target.get_decoder().layers
    hooks = [
        layers[tap].register_forward_hook(lambda *call, tap=tap: keep(tap, call[2])) for tap in taps
    ]
    try:
        logits = target(token_ids, past_key_values=cache, use_cache=True).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits, torch.cat([outputs[tap][0] for tap in taps], dim=-1)


@torch.inference_mode()
def draft(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    features: torch.Tensor,  # [C, m * H]
    bonus: int,
    num_draft_tokens: int,
) -> torch.Tensor:
    """Logits [K, V] of one block behind C context rows; row i is for position C + 1 + i."""
    masks = [drafter.spec.mask_token_id] * num_draft_tokens
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    block_ids = torch.tensor([[bonus, *masks]], device=features.device)
    positions = torch.arange(len(features) + 1 + num_draft_tokens, device=features.device)
    z = drafter.context(features[None])
    hidden = drafter(embed(block_ids), z, positions[None])  # [1, 1 + K, H]
    return head(hidden[0, 1:])


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    drafter: ReferenceDrafter,
    prompt: list[int],
    max_new_tokens: int,
    *,
    num_draft_tokens: int | None = None,
    stop_ids: Collection[int] = (),
) -> Generation:
    """Greedy DFlash decoding of one prompt.

    Never drafts more than the request can still use, as the engine does.
    """
    spec = drafter.spec
    k_max = spec.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
    cache = DynamicCache(config=target.config)
    device = target.device
    logits, features = target_step(target, torch.tensor([prompt], device=device), cache, spec.taps)
    tokens = [int(logits[-1].argmax())]
    acceptance_lengths: list[int] = []
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        k = min(k_max, max_new_tokens - len(tokens) - 1)
        drafts = []
        if k > 0:
            drafts = draft(target, drafter, features, tokens[-1], k).argmax(-1).tolist()
        # Verify: one target pass over the bonus token and the drafts.
        block = torch.tensor([[tokens[-1], *drafts]], device=device)
        logits, new_features = target_step(target, block, cache, spec.taps)
        choices = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < k and drafts[accepted] == choices[accepted]:
            accepted += 1
        # Only rows of accepted tokens become context; the cache forgets the rejected ones.
        features = torch.cat([features, new_features[: accepted + 1]])
        cache.crop(len(features))
        produced = choices[: accepted + 1]
        if k > 0:
            acceptance_lengths.append(len(produced))
        stop = next((i for i, token in enumerate(produced) if token in stop_ids), None)
        tokens += produced if stop is None else produced[: stop + 1]
    return Generation(tokens[:max_new_tokens], acceptance_lengths)
