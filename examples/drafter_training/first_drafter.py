"""The drafter of a packaged target: its shape, its first weights, and its checkpoint."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from drafter_training.target_layers import as_drafter_layer, factor_of, sizes_before_norms
from packaged_pairs.pair_table import DrafterShape
from reference.reference_drafter import ReferenceDrafter
from vllm_dflash.checkpoint.read import parse_config


def drafter_config(target: PreTrainedModel, shape: DrafterShape) -> dict[str, Any]:
    """A `config.json` as the speculators library writes them."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
    names += ["num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"]
    names += ["attention_bias"]
    drafts, rope = shape.block_size - 1, target.config.rope_parameters
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {
                "name_or_path": shape.target_name,
                "architectures": [type(target).__name__],
            },
        },
        "dtype": "bfloat16",
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
        "draft_vocab_size": shape.vocabulary,
        "target_hidden_size": target.config.hidden_size,
        "transformer_layer_config": {
            **{name: getattr(target.config, name) for name in names},
            "hidden_act": "silu",
            "rope_parameters": rope.get("full_attention", rope),
            "model_type": "qwen3",
            "num_hidden_layers": len(shape.like),
            "layer_types": ["full_attention"] * len(shape.like),
            "tie_word_embeddings": False,
        },
    }


def frequent_tokens(texts: list[list[int]], count: int) -> torch.Tensor:
    """Return the `count` most frequent tokens of the texts, ascending: [V'].

    If there are too few, add those with the lowest ids, which a vocabulary of merges has first.
    """
    counts = Counter(token for text in texts for token in text)
    counts.update(range(2 * count))
    return torch.tensor(sorted(token for token, _ in counts.most_common(count)))


def drafter_of_shape(
    target: PreTrainedModel, shape: DrafterShape, tokens: torch.Tensor
) -> ReferenceDrafter:
    """Build a drafter with random weights, and a head of the target's rows, which is not trained.

    `tokens`: the tokens that it can draft, [V'], ascending.
    """
    torch.manual_seed(0)
    drafter = ReferenceDrafter(parse_config("drafter", drafter_config(target, shape)))
    drafter.d2t = tokens - torch.arange(len(tokens))
    head = target.get_output_embeddings().weight
    drafter.lm_head = nn.Linear(target.config.hidden_size, len(tokens), bias=False)
    drafter.lm_head.weight = nn.Parameter(head[tokens].clone(), False)
    return drafter


def begin_as_target(
    drafter: ReferenceDrafter, target: PreTrainedModel, shape: DrafterShape, text: list[int]
) -> None:
    """Set a drafter's weights to some of the target's layers, over the output of the last tap.

    `text`: any, to see the size of the target's activations in.
    """
    hidden = target.config.hidden_size
    layers = [target.model.layers[number] for number in shape.like]
    sizes = sizes_before_norms(target, layers, text)
    with torch.no_grad():
        drafter.fc.weight *= 0.1
        drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
        drafter.norm.weight.copy_(factor_of(target.model.norm))
        for layer, like in zip(drafter.layers, layers, strict=True):
            layer.load_state_dict(as_drafter_layer(like, drafter.spec, sizes))


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
