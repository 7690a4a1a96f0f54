"""Tiny random target/drafter pairs, written to disk as real checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from reference.reference_drafter import ReferenceDrafter
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.checkpoint.tensors import required_vocabulary


@dataclass
class Pair:
    target: Path
    drafter: Path
    spec: DrafterSpec

    def load_target(self) -> Qwen3ForCausalLM:
        return Qwen3ForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()

    def load_drafter(self) -> ReferenceDrafter:
        return ReferenceDrafter.load(self.spec, self.drafter)

    def start(self, speculative: dict[str, Any] | None = None, **changes: Any) -> Any:
        """Do what precedes any process of an engine with this pair; return vLLM's config."""
        from vllm.engine.arg_utils import EngineArgs

        asked: dict[str, Any] = {"model": str(self.target), "max_model_len": 256}
        asked |= {"skip_tokenizer_init": True, "dtype": "float32"}
        drafts = {"method": "dflash", "model": str(self.drafter), **(speculative or {})}
        asked["speculative_config"] = drafts
        return EngineArgs(**asked | changes).create_engine_config()


def drafter_config(**changes: Any) -> dict[str, Any]:
    """Return a z-lab-format config that fits `make_pair`'s default target."""
    config: dict[str, Any] = {
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


def dflash2_config(**changes: Any) -> dict[str, Any]:
    """Return the changes that turn `drafter_config`'s drafter into DFlash 2, and these."""
    nested = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    nested |= changes.pop("dflash_config", {})
    return {"architectures": ["DFlash2DraftModel"], "dflash_config": nested, **changes}


def lilicorr_config(**changes: Any) -> dict[str, Any]:
    """Return the changes that turn `drafter_config`'s drafter into LiLiCorr, and these."""
    nested = {
        "lilicorr_candidate_topk": 4,
        "lilicorr_hidden_size": 48,
        "lilicorr_num_layers": 2,
        "lilicorr_num_heads": 3,
        "lilicorr_mlp_ratio": 1.5,
        "lilicorr_factor_dim": 10,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    }
    nested |= changes.pop("dflash_config", {})
    return {"architectures": ["LiLiCorrDraftModel"], "dflash_config": nested, **changes}


def as_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same drafter's config as the speculators library writes it."""
    layer = {k: v for k, v in config.items() if k not in ("architectures", "dflash_config")}
    nested = config["dflash_config"]
    own = ("block_size", "draft_vocab_size", "target_hidden_size", "sliding_window_non_causal")
    return {
        "architectures": config["architectures"],
        "speculators_model_type": "dflash2" if "conv_kernel_size" in nested else "dflash",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config["block_size"] - 1}
            ],
            "verifier": {"name_or_path": "somewhere", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {k: v for k, v in layer.items() if k not in own},
        **{k: layer[k] for k in own if k in layer},
        **{k: v for k, v in nested.items() if k not in ("mask_token_id", "target_layer_ids")},
        "mask_token_id": nested["mask_token_id"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in nested["target_layer_ids"]],
    }


def save_drafter(
    folder: Path,
    config: dict[str, Any],
    *,
    own_vocabulary: bool = False,
    mask_embedding: bool = False,
) -> DrafterSpec:
    """Write a random drafter of this config, with an embedding and a head if it needs them."""
    torch.manual_seed(1)
    spec = parse_config(str(folder), config)
    drafter = ReferenceDrafter(spec)
    required = required_vocabulary(spec)
    if own_vocabulary or "embed_tokens.weight" in required:
        drafter.embed_tokens = torch.nn.Embedding(spec.vocab_size, spec.hidden_size)
    if own_vocabulary or "lm_head.weight" in required:
        drafter.lm_head = torch.nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            # Norms away from one and weights large enough that every term matters.
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in name else 0.0, scale)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    if spec.draft_vocab_size != spec.vocab_size:
        kept = torch.randperm(spec.vocab_size)[: spec.draft_vocab_size].sort().values
        tensors["d2t"] = kept - torch.arange(spec.draft_vocab_size)
        tensors["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, kept, True)
    if mask_embedding:
        state = {"embedding": torch.randn(spec.hidden_size), "mask_token_id": spec.mask_token_id}
        torch.save(state, folder / "mask_embedding.pt")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return spec


def changed_drafter(folder: Path, **changes: Any) -> Path:
    """Write a drafter whose config has these changes and whose weights fit it."""
    save_drafter(folder / "drafter", drafter_config(**changes))
    return folder / "drafter"


def make_pair(
    folder: Path,
    *,
    speculators: bool = False,
    own_vocabulary: bool = False,
    mask_embedding: bool = False,
    target_vocab_size: int | None = None,
    **changes: Any,
) -> Pair:
    """Write a random Qwen3 target and a random drafter whose config has these changes."""
    config = drafter_config(**changes)
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=target_vocab_size or config["vocab_size"],
            hidden_size=config.get("target_hidden_size", config["hidden_size"]),
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
    spec = save_drafter(
        folder / "drafter",
        as_speculators(config) if speculators else config,
        own_vocabulary=own_vocabulary,
        mask_embedding=mask_embedding,
    )
    return Pair(folder / "target", folder / "drafter", spec)
