"""DFlash in plain PyTorch: readable reference, and oracle of the tests.

A drafter proposes a whole block of tokens in one forward pass (arXiv 2602.06036). Names:
B block size, K drafted tokens, m taps, H hidden size, C context rows, Q query rows.

    Z = RMSNorm(W_fc . concat(taps of the target))        context, shared by all layers
    X = E_target[bonus, mask x K]                         the block
    per layer:  X += attention(Q(X), K/V of [Z; X]);  X += MLP(X)
    drafts = argmax(head_target(RMSNorm(X)[1:]))          each mask row predicts its own position

So K is B - 1 at most. With `sample_from_anchor`, each row predicts the position after its own:
X has K - 1 masks, all of its rows predict, and K is B at most.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from reference.reference_dflash2 import ReferenceConvolution, ReferenceSelector
from reference.reference_lilicorr import ReferenceLattice, walk
from vllm_dflash.checkpoint.headers import read_folder
from vllm_dflash.checkpoint.names import our_name
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.checkpoint.tensors import MASK_EMBEDDING_FILE, parse_mask_embedding


def rotary_of(spec: DrafterSpec, rope: dict[str, Any]) -> Qwen3RotaryEmbedding:
    """Module that returns cosines and sines of positions, for the rotated part of a head."""
    rope = dict(rope)
    part = rope.pop("partial_rotary_factor", None) or 1  # this class would ignore it
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
    """Rotate the first entries of heads [R, heads, T, D], as many as `cos` [R, T, ...] has.

    Pairs are the two halves (neox) or neighbouring entries.
    """
    t, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
    if not is_neox_style:
        t = torch.cat([t[..., ::2], t[..., 1::2]], dim=-1)
    t, _ = apply_rotary_pos_emb(t, t, cos, sin)
    if not is_neox_style:
        t = torch.stack(t.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat([t, rest], dim=-1)


class ReferenceAttention(nn.Module):
    """Attention of the block's queries over keys and values of the context and the block."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.value_scale = spec.value_scale or 1.0
        self.is_neox_style = spec.is_neox_style
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.attention_bias)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = Qwen3RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.attention_sink_bias: nn.Parameter | None = None
        if spec.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(spec.num_heads))

    def forward(
        self,
        x: torch.Tensor,  # [R, Q, H]
        z: torch.Tensor,  # [R, C, H]
        rope: tuple[torch.Tensor, torch.Tensor],  # cos, sin: [R, C + Q, rotated part of D]
        visible: torch.Tensor,  # [R, 1, Q, C + Q] bool
    ) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (-1, self.head_dim))  # [R, T, heads, D]

        rows = torch.cat([z, x], dim=1)  # [R, C + Q, H]
        q = self.q_norm(heads(self.q_proj(x))).transpose(1, 2)  # [R, heads, Q, D]
        k = self.k_norm(heads(self.k_proj(rows))).transpose(1, 2)  # [R, kv, C + Q, D]
        v = heads(self.v_proj(rows)).transpose(1, 2) * self.value_scale
        cos, sin = rope
        num_queries = x.shape[1]
        q = rotate(q, cos[:, -num_queries:], sin[:, -num_queries:], self.is_neox_style)
        k = rotate(k, cos, sin, self.is_neox_style)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5  # [R, heads, Q, C + Q]
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.attention_sink_bias is not None:
            # A logit that takes a share of the attention but has no value.
            sink = self.attention_sink_bias.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink.to(scores)], dim=-1)
        weights = scores.softmax(dim=-1)[..., : k.shape[2]]
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))  # [R, Q, H]


class ReferenceLayer(nn.Module):
    """One layer of the drafter. The context is not normed per layer; the block is."""

    def __init__(self, spec: DrafterSpec, number: int, config: Qwen3Config) -> None:
        super().__init__()
        self.rotary = rotary_of(spec, spec.rope_parameters)
        self.self_attn = ReferenceAttention(spec)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.attention_conv: ReferenceConvolution | None = None
        self.mlp_conv: ReferenceConvolution | None = None
        if (made := spec.convolutions) is not None:
            self.attention_conv = ReferenceConvolution(spec.hidden_size, made)
            self.mlp_conv = ReferenceConvolution(spec.hidden_size, made)

    def forward(
        self,
        x: torch.Tensor,
        z: torch.Tensor,
        positions: torch.Tensor,
        visible: torch.Tensor,
        width: int,
    ) -> torch.Tensor:
        rope = self.rotary(x, positions)

        def attend(rows: torch.Tensor) -> torch.Tensor:
            return self.self_attn(rows, z, rope, visible)

        if self.attention_conv is None or self.mlp_conv is None:
            x = x + attend(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.attention_conv(attend, self.input_layernorm(x), width)
        return x + self.mlp_conv(self.mlp, self.post_attention_layernorm(x), width)


class ReferenceDrafter(nn.Module):
    """A DFlash drafter with the parameter names of z-lab's checkpoints."""

    d2t: torch.Tensor | None

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
        )
        fused = len(spec.taps) * spec.target_hidden_size
        self.fc = nn.Linear(fused, spec.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(ReferenceLayer(spec, i, config) for i in range(spec.num_layers))
        self.norm = Qwen3RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        self.candidate_selector: ReferenceSelector | None = None
        if spec.dflash2 is not None:
            self.candidate_selector = ReferenceSelector(
                spec.vocab_size, spec.hidden_size, spec.dflash2
            )
        self.lilicorr: ReferenceLattice | None = None
        if spec.lilicorr is not None:
            self.lilicorr = ReferenceLattice(spec, spec.lilicorr)
        self.register_buffer("d2t", None)
        self.mask_embedding: torch.Tensor | None = None

    @classmethod
    def load(cls, spec: DrafterSpec, folder: str | Path) -> ReferenceDrafter:
        """Load the `*.safetensors` of a folder strictly, in the file's own dtype.

        Raises:
            HeadersError: there are none, or one is damaged.
        """
        drafter = cls(spec)
        tensors: dict[str, torch.Tensor] = {}
        for name in read_folder(Path(folder)).files:
            tensors |= load_file(Path(folder) / name)
        tensors.pop("t2d", None)
        tensors = {
            our_name(name): one for name, one in tensors.items() if not spec.leaves_out(name)
        }
        if "embed_tokens.weight" in tensors:
            drafter.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if "lm_head.weight" in tensors:
            drafter.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        if "d2t" in tensors:
            drafter.d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64)
        drafter.load_state_dict(tensors, strict=True)
        mask_file = Path(folder) / MASK_EMBEDDING_FILE
        if mask_file.exists():
            drafter.mask_embedding = parse_mask_embedding(spec, mask_file.read_bytes())
        return drafter.eval()

    def embed(self, token_ids: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
        """Embeddings [T, H] of token ids [T], the target's unless the drafter has its own."""
        table = target.get_input_embeddings() if self.embed_tokens is None else self.embed_tokens
        x = table(token_ids)
        if self.mask_embedding is not None:
            x[token_ids == self.spec.mask_token_id] = self.mask_embedding.to(x)
        return x if self.spec.dflash2 is None else x * self.spec.dflash2.input_embedding_scale

    def logits(self, hidden: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
        """Logits of hidden states, as in the target unless the drafter has its own head."""
        own = self.lm_head
        logits = (target.get_output_embeddings() if own is None else own)(hidden)
        if self.spec.lilicorr is not None:
            return logits
        if (second := self.spec.dflash2) is not None:
            logits, cap = logits * second.output_multiplier, second.final_logit_softcapping
            return logits if cap is None else torch.tanh(logits / cap) * cap
        if own is not None:
            return logits * self.spec.logit_scale
        config = target.config.get_text_config()
        logits = logits * getattr(config, "logit_scale", 1.0)  # Cohere
        logits = logits / getattr(config, "logits_scaling", 1.0)  # Granite
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target for columns of logits."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def choose(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        bonus: int,
        newest: torch.Tensor,
        target: PreTrainedModel,
    ) -> torch.Tensor:
        """Tokens of one block, [K], from logits [K, V'] and hidden states [K, H], after the `bonus`
        token. `newest`: context of the token before it, [H]."""
        if self.lilicorr is not None:
            embed = target.get_input_embeddings()
            tokens = walk(*self.lilicorr.weigh(logits, hidden, newest, embed))
        elif self.candidate_selector is not None:
            tokens, _ = self.candidate_selector.walk(logits, hidden, bonus)
        else:
            return self.target_ids(logits.argmax(-1))
        return torch.tensor(tokens, device=logits.device)

    def context(self, features: torch.Tensor) -> torch.Tensor:
        """Z, [..., H], of taps concatenated in ascending layer order, [..., m * H]."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        block: torch.Tensor,  # [R, Q, H] embeddings
        context: torch.Tensor,  # [R, C, H], from `context`
        positions: torch.Tensor,  # [R, C + Q]
        visible: torch.Tensor | None = None,  # [R, 1, Q, C + Q] bool
        width: int | None = None,
    ) -> torch.Tensor:
        """Return the normed hidden states of the block, [R, Q, H].

        `visible` says which keys a query may see, before the layer's window and causality apply;
        None means all of them (one block after its whole context). `width`: rows per block, if Q
        covers several blocks.
        """
        num_queries = block.shape[1]
        if visible is None:
            shape = (block.shape[0], 1, num_queries, positions.shape[1])
            visible = torch.ones(shape, dtype=torch.bool, device=block.device)
        q_pos, k_pos = positions[:, None, -num_queries:, None], positions[:, None, None, :]
        for number, (layer, causal) in enumerate(zip(self.layers, self.spec.causal, strict=True)):
            seen, window = visible, self.spec.layer_window(number)
            if causal:
                seen = seen & (k_pos <= q_pos)
            if window is not None:
                seen = seen & (q_pos - k_pos < window)
                if not causal:
                    seen = seen & (k_pos - q_pos < window)
            block = layer(block, context, positions, seen, width or num_queries)
        return self.norm(block)


@torch.inference_mode()
def target_step(
    target: PreTrainedModel, token_ids: torch.Tensor, cache: DynamicCache, taps: Collection[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target over new tokens [1, T]. Returns logits [T, V] and features [T, m * H]."""
    # Hooks, because Hugging Face norms the last entry of `hidden_states`, and taps are not normed.
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
