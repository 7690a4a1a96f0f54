"""Configs of drafters and the specs they mean, each written by hand in full.

The meaning of a config is taken from the paper, from vLLM's own DFlash model and its converter of
speculators, and from transformers' rotary settings: never from the reader that is tested.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"

# z-lab/Qwen3-8B-DFlash-b16.
QWEN: Fields = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "layer_types": [FULL] * 5,
    "sliding_window": None,
    "max_position_embeddings": 40960,
    "rope_theta": 5000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
QWEN_SPEC: Fields = {
    "model": "it",
    "dialect": "z-lab",
    "block_size": 16,
    "mask_token_id": 151669,
    "taps": (1, 9, 17, 25, 33),
    "target_hidden_size": 4096,
    "num_target_layers": 36,
    "vocab_size": 151936,
    "draft_vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_layers": 5,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000000},
    "max_position_embeddings": 40960,
    "windows": (None, None, None, None, None),
    "draft_window": None,
    "causal": (False, False, False, False, False),
    "attention_sinks": False,
    "value_scale": None,
    "logit_scale": 1.0,
    "is_neox_style": True,
    "sample_from_anchor": False,
    "dflash2": None,
    "lilicorr": None,
    "quantization": None,
    "base_is_assumed": False,
    "length_heads": (),
    "remarks": (),
}

# A drafter of gpt-oss: another width than its target's, biases, YaRN as transformers 5 writes it.
GPT_OSS: Fields = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 8,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    "num_target_layers": 24,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
    "hidden_size": 1440,
    "target_hidden_size": 2880,
    "intermediate_size": 7680,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "attention_bias": True,
    "logit_scale": 0.25,
    "is_neox_style": False,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
# A drafter of the speculators library, with a vocabulary of its own.
SPECULATORS: Fields = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.3.0",
    "block_size": 8,
    "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 18, 34],
    "draft_vocab_size": 32000,
    "target_hidden_size": 2560,
    "sample_from_anchor": False,
    "speculators_config": {"algorithm": "dflash"},
    "transformer_layer_config": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "layer_types": [SLIDING, FULL, SLIDING],
        "sliding_window": 1024,
        "max_position_embeddings": 65536,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
SPECULATORS_SPEC: Fields = {
    **QWEN_SPEC,
    "dialect": "speculators",
    "block_size": 8,
    "taps": (1, 17, 33),  # 2 is the output of layer 1: the embedding counts as 0
    "target_hidden_size": 2560,
    "num_target_layers": None,
    "draft_vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_layers": 3,
    "num_heads": 16,
    "num_kv_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 65536,
    "windows": (1024, None, 1024),
    "causal": (False, False, False),  # the library trains all layers bidirectional by default
}

WHOLE = {"z-lab": (QWEN, QWEN_SPEC), "speculators": (SPECULATORS, SPECULATORS_SPEC)}

LLAMA3: Fields = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def nested(**fields: Any) -> Fields:
    """Return QWEN's `dflash_config` with these fields."""
    return {"dflash_config": {**QWEN["dflash_config"], **fields}}
