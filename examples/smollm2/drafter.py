"""The drafter of SmolLM2-135M-Instruct: its shape, its first weights, and its checkpoint."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from reference.reference_drafter import ReferenceDrafter
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterSpec

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK_SIZE = 8
TAPS = [1, 8, 15, 21, 27]
LIKE = [28, 29]
"""The target's layers that the drafter's layers start as."""
DRAFT_VOCABULARY = 8192
MASK_TOKEN_ID = 16  # <empty_output>: the model never writes it


def drafter_config(target: LlamaForCausalLM) -> dict[str, Any]:
    """A `config.json` as the speculators library writes them."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "hidden_act"]
    names += ["num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters"]
    names += ["rms_norm_eps", "attention_bias"]
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK_SIZE - 1}],
            "verifier": {"name_or_path": NAME, "architectures": ["LlamaForCausalLM"]},
        },
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in TAPS],
        "draft_vocab_size": DRAFT_VOCABULARY,
        "target_hidden_size": target.config.hidden_size,
        "transformer_layer_config": {
            **{name: getattr(target.config, name) for name in names},
            "model_type": "qwen3",
            "num_hidden_layers": len(LIKE),
            "layer_types": ["full_attention"] * len(LIKE),
            "tie_word_embeddings": False,
        },
    }


def frequent_tokens(texts: list[list[int]]) -> torch.Tensor:
    """Return the most frequent tokens of the texts, ascending: [V'].

    If there are too few, add those with the lowest ids, which a vocabulary of merges has first.
    """
    counts = Counter(token for text in texts for token in text)
    counts.update(range(2 * DRAFT_VOCABULARY))
    return torch.tensor(sorted(token for token, _ in counts.most_common(DRAFT_VOCABULARY)))


def first_drafter(target: LlamaForCausalLM, tokens: torch.Tensor) -> ReferenceDrafter:
    """Build a drafter that starts as the target's last layers, over the output of the newest tap.

    `tokens`: the tokens that it can draft, [V'], ascending. Its head has the target's rows, which
    are not trained.
    """
    torch.manual_seed(0)
    drafter = ReferenceDrafter(parse_config("drafter", drafter_config(target)))
    drafter.d2t = tokens - torch.arange(len(tokens))
    drafter.lm_head = nn.Linear(target.config.hidden_size, len(tokens), bias=False)
    drafter.lm_head.weight = nn.Parameter(target.lm_head.weight[tokens].clone(), False)
    hidden = target.config.hidden_size
    with torch.no_grad():
        drafter.fc.weight *= 0.1
        drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
        drafter.norm.weight.copy_(target.model.norm.weight)
        for layer, number in zip(drafter.layers, LIKE, strict=True):
            layer.load_state_dict(as_drafter_layer(target.model.layers[number], drafter.spec))
    return drafter


def as_drafter_layer(like: LlamaDecoderLayer, spec: DrafterSpec) -> dict[str, torch.Tensor]:
    """Return the weights of a drafter's layer that starts as one of the target's.

    A drafter norms its context once, for all layers, so a layer's own norm moves into the weights
    after it. It also norms queries and keys, which a Llama does not: to about their old size.
    """
    weights = {**like.state_dict()}
    scale = weights["input_layernorm.weight"]
    for name in ("q", "k", "v"):
        weights[f"self_attn.{name}_proj.weight"] = weights[f"self_attn.{name}_proj.weight"] * scale
    for name in ("q", "k"):
        rows = weights[f"self_attn.{name}_proj.weight"].unflatten(0, (-1, spec.head_dim))
        size = rows.square().sum(-1).mean().sqrt()
        weights[f"self_attn.{name}_norm.weight"] = size.expand(spec.head_dim)
    return weights | {"input_layernorm.weight": torch.ones_like(scale)}


def write_drafter(drafter: ReferenceDrafter, config: dict[str, Any], out: Path) -> None:
    """Write a checkpoint in bf16, as the speculators library does."""
    assert drafter.d2t is not None
    out.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().bfloat16().contiguous() for name, p in drafter.named_parameters()}
    tokens = drafter.d2t + torch.arange(len(drafter.d2t))
    drafted = torch.zeros(drafter.spec.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    save_file(
        {**state, "d2t": drafter.d2t, "t2d": drafted},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
