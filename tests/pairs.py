"""Tiny random target/drafter pairs, written to disk as real checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.reference import ReferenceDrafter


@dataclass
class Pair:
    target: Path
    drafter: Path
    spec: DrafterSpec

    def load_target(self) -> Qwen3ForCausalLM:
        return Qwen3ForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()

    def load_drafter(self) -> ReferenceDrafter:
        return ReferenceDrafter.load(self.spec, self.drafter)


def drafter_config(**changes: Any) -> dict[str, Any]:
    """A z-lab-format config that fits `make_pair`'s default target."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_target_layers": 4,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 2]},
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
    }
    nested = {**config["dflash_config"], **changes.pop("dflash_config", {})}
    return {**config, **changes, "dflash_config": nested}


def save_drafter(folder: Path, config: dict[str, Any], seed: int = 1) -> DrafterSpec:
    """Write a random drafter of this config."""
    torch.manual_seed(seed)
    spec = parse_config(str(folder), config)
    drafter = ReferenceDrafter(spec)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            # Norms away from one and weights large enough that every term matters.
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return spec


def make_pair(folder: Path, **changes: Any) -> Pair:
    """Write a random Qwen3 target and a random drafter whose config has these changes."""
    config = drafter_config(**changes)
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=96,
            num_hidden_layers=config["num_target_layers"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )
    target.save_pretrained(folder / "target")
    spec = save_drafter(folder / "drafter", config)
    return Pair(folder / "target", folder / "drafter", spec)
