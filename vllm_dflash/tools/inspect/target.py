"""Reading a target through vLLM's own configs; nothing is loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.pairing import PairingTarget
from vllm_dflash.checkpoint.refusal import folder_fault, looks_local, without_frame

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class TargetUnreadableError(ValueError):
    """The target's config cannot be read; the message says what to do."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of vLLM that change the answer; None leaves one to vLLM."""

    tensor_parallel_size: int = 1
    dtype: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    model_impl: str | None = None
    trust_remote_code: bool = False

    def written(self) -> dict[str, Any]:
        """Those that were set, by the names `EngineArgs` and `vllm serve` know them by."""
        plain = dataclasses.asdict(EngineOptions())
        mine = dataclasses.asdict(self)
        return {name: value for name, value in mine.items() if value != plain[name]}

    def engine_args(self, target: str) -> Any:
        """`EngineArgs` of one rank: sizes are divided by us, so that no rank need exist here."""
        from vllm.engine.arg_utils import EngineArgs

        written = self.written()
        written.pop("tensor_parallel_size", None)
        return EngineArgs(model=target, skip_tokenizer_init=True, **written)


def read_target(target: str, options: EngineOptions) -> ModelConfig:
    """vLLM's config of the model at `target`, a folder or a repository.

    Raises:
        TargetUnreadableError: with what vLLM says about it.
    """
    if found := folder_fault(target):
        raise TargetUnreadableError(
            f"target {target!r}: {found}. Pass --target a folder with a model of Hugging Face's"
            " format, or the name of its repository."
        )
    try:
        return options.engine_args(target).create_model_config()
    except Exception as error:  # a config is a stranger's, and so is what breaks on it
        remedy = (
            "" if looks_local(target) else " Download it first, and pass the folder, or try again."
        )
        raise TargetUnreadableError(
            f"target {target!r} cannot be read: {_short(error)}{remedy}"
        ) from error


def engine_config(target: str, options: EngineOptions) -> VllmConfig:
    """The config of an engine without a drafter. Raises ValueError where there is none."""
    try:
        return options.engine_args(target).create_engine_config()
    except Exception as error:
        raise ValueError(f"vLLM makes no engine of this config here: {_short(error)}") from error


def pairing_facts(model: ModelConfig) -> PairingTarget:
    """What decides whether a drafter fits, on one rank. Raises `TargetUnreadableError`."""
    from vllm_dflash.config.pair import target_facts

    try:
        return target_facts(model)
    except Exception as error:  # vLLM imports the model's class
        raise TargetUnreadableError(
            f"target {model.model!r} cannot be read: vLLM has no class for it: {_short(error)}"
        ) from error


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


def _short(error: Exception) -> str:
    return without_frame(error) or type(error).__name__
