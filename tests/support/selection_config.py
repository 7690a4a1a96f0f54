"""Configs of engines: a tiny pair on disk, and the config that the front end makes for it.

Import it in a process that has called `fake_cuda`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from support.pairs import drafter_config, save_drafter
from support.selection_table import Cell

HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPE: dict[str, Any] = {
    **HEADS,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LAYERS = {
    "full": [FULL] * 4,
    "mixed": [SLIDING, FULL] * 2,
    "hybrid": [LINEAR, LINEAR, LINEAR, FULL],
}
WINDOW = 128
MAX_REQUESTS = 64


def write_pair(folder: Path) -> None:
    """Write a drafter, and the config of a target of each kind, whose weights are never loaded."""
    targets = {
        "full": (Qwen3Config, "Qwen3ForCausalLM", {}),
        "mixed": (LlamaConfig, "LlamaForCausalLM", {"sliding_window": WINDOW}),
        "hybrid": (Qwen3NextConfig, "Qwen3NextForCausalLM", {}),
    }
    for kind, (of_kind, architecture, fields) in targets.items():
        config = of_kind(**SHAPE, layer_types=LAYERS[kind], **fields)
        config.architectures = [architecture]
        config.save_pretrained(folder / kind)
    layers = {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
    save_drafter(folder / "drafter", drafter_config(**HEADS, dtype="bfloat16", **layers))


def create_config(folder: Path, cell: Cell) -> VllmConfig:
    """Create a config as `vllm serve` does, with our plugin and all of vLLM's validation."""
    speculative: dict[str, Any] = {"method": "dflash", "model": str(folder / "drafter")}
    if cell.drafter_backend != "auto":
        speculative["attention_backend"] = cell.drafter_backend
    if cell.is_adaptive:
        speculative["enable_adaptive_verification"] = True
    settings: dict[str, Any] = {}
    if cell.level == "eager":
        settings["enforce_eager"] = True
    else:
        settings["optimization_level"] = int(cell.level.removeprefix("-O"))
    if cell.backend != "auto":
        settings["attention_backend"] = cell.backend
    if not cell.is_async:
        settings["async_scheduling"] = False
    return EngineArgs(
        model=str(folder / cell.target),
        speculative_config=speculative,
        skip_tokenizer_init=True,
        max_num_seqs=MAX_REQUESTS,
        max_model_len=512,
        **settings,
    ).create_engine_config()
