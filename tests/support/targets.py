"""Tiny random targets of several families, written to disk as real checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}

LINEAR = {
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def _builder(name: str, **fields: Any) -> Callable[[], PreTrainedModel]:
    def build() -> PreTrainedModel:
        config = getattr(transformers, f"{name}Config")(**{**SHAPE, **fields})
        architecture = name.removesuffix("Text")
        return getattr(transformers, f"{architecture}ForCausalLM")(config)

    return build


BUILDERS = {
    "llama": _builder("Llama"),
    "llama-tied": _builder("Llama", tie_word_embeddings=True),
    "qwen2": _builder("Qwen2", num_attention_heads=2, num_key_value_heads=1),  # heads of 32
    "qwen3-tied": _builder("Qwen3", tie_word_embeddings=True),
    "qwen3-moe": _builder("Qwen3Moe", **EXPERTS),
    "gemma2": _builder(
        "Gemma2",
        query_pre_attn_scalar=32,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=10.0,
        attn_implementation="eager",  # the only one that caps attention
        **SLIDING,
    ),
    "gemma3": _builder("Gemma3Text", query_pre_attn_scalar=32, **SLIDING),
    "gemma4": _builder(
        "Gemma4Text",
        final_logit_softcapping=5.0,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        global_head_dim=32,
        num_global_key_value_heads=2,
        **SLIDING,
    ),
    "gpt-oss": _builder(
        "GptOss", num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN, **SLIDING
    ),
    "mistral": _builder("Mistral", sliding_window=24),  # in every layer
    "granite": _builder("Granite", embedding_multiplier=3.0, logits_scaling=4.0),
}
HYBRIDS = {
    # All experts at once: otherwise rounding would decide which of them are chosen.
    "qwen3-next": _builder(
        "Qwen3Next",
        shared_expert_intermediate_size=48,
        **{**EXPERTS, "num_experts_per_tok": 4},
        **LINEAR,
    ),
    "qwen3.5": _builder("Qwen3_5Text", **LINEAR),
}
"""Targets with gated delta nets. Their keys and values are as large as `drafter_config`'s."""
ENGINE_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"model_impl": "transformers"},
    "gemma3": {"model_impl": "transformers"},
}


def make_target(folder: Path, family: str) -> PreTrainedModel:
    """Write a random target of this family whose weights all matter; returns it."""
    torch.manual_seed(0)
    target = {**BUILDERS, **HYBRIDS}[family]().float().eval()
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if "norm" in name:
                parameter.normal_(parameter.mean().item(), 0.2)
            elif name.endswith(("A_log", "dt_bias", "conv1d.weight")):
                parameter.normal_(0.0, 0.5)
            elif "sinks" in name:
                parameter.normal_()
            elif parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    target.save_pretrained(folder)
    return target


@torch.inference_mode()
def continued(target: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return a prompt with `count` more tokens as Hugging Face's target writes them greedily."""
    tokens = list(prompt)
    for _ in range(count):
        logits = target(torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def write_config(folder: Path, family: str, **fields: Any) -> None:
    """Write only the config of a target, which is never loaded."""
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **fields})
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(folder)
