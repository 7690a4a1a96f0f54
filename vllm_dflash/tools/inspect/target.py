"""Reading a target through vLLM's own configs; nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.pairing import PairingTarget
from vllm_dflash.checkpoint.refusal import folder_fault, looks_local, without_frame

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs


def engine_args(target: str, engine: Mapping[str, Any]) -> EngineArgs:
    """vLLM's, of one rank: sizes are divided by us, so that no rank need exist here."""
    from vllm.engine.arg_utils import EngineArgs

    written = {name: value for name, value in engine.items() if name != "tensor_parallel_size"}
    return EngineArgs(model=target, skip_tokenizer_init=True, **written)


def read_target(target: str, engine: Mapping[str, Any]) -> tuple[ModelConfig, PairingTarget]:
    """vLLM's config of the model at `target`, a folder or a repository, and what pairing needs.

    Raises:
        ValueError: it cannot be read; with what vLLM says about it.
    """
    from vllm_dflash.config.pair import target_facts

    if found := folder_fault(target):
        raise ValueError(
            f"target {target!r}: {found}. Pass --target a folder with a model of Hugging Face's"
            " format, or the name of its repository."
        )
    try:
        model = engine_args(target, engine).create_model_config()
        return model, target_facts(model, None)
    except Exception as error:  # a config is a stranger's, and so is what breaks on it
        remedy = (
            "" if looks_local(target) else " Download it first, and pass the folder, or try again."
        )
        raise ValueError(f"target {target!r} cannot be read: {short(error)}{remedy}") from error


def rank_faults(model: ModelConfig, tp_size: int) -> list[str]:
    """Why vLLM cannot divide the target among so many ranks."""
    shape = model.model_arch_config
    faults = []
    if shape.total_num_attention_heads % tp_size:
        faults.append(
            f"the target's {shape.total_num_attention_heads} attention heads do not divide by"
            f" tensor_parallel_size {tp_size}"
        )
    kv_heads = shape.total_num_kv_heads
    if not model.use_mla and kv_heads % tp_size and tp_size % kv_heads:
        faults.append(
            f"the target's {kv_heads} key/value heads neither divide by tensor_parallel_size"
            f" {tp_size} nor divide it"
        )
    return faults


def short(error: Exception) -> str:
    """What it says, in one line."""
    return without_frame(error) or type(error).__name__
