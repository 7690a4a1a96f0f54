"""Engines with method `dflash` that our code does not run are left to vLLM's own DFlash.

Installing this package removes no vLLM feature. One line in the log says why vLLM's own code runs,
and what would change that. What vLLM's own DFlash cannot run either is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.read import config_field, load_config
from vllm_dflash.checkpoint.spec import (
    ARCHITECTURE_2,
    ARCHITECTURE_LILICORR,
    ARCHITECTURES,
    DrafterError,
)
from vllm_dflash.checkpoint.tensors import MASK_EMBEDDING_FILE
from vllm_dflash.compatibility import vllm_unsupported_reason
from vllm_dflash.config.engine_options import runner_here, uses_our_ray_executor, worker_here
from vllm_dflash.config.speculative_settings import written_settings
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs


def architecture_of_vllm(config: Mapping[str, Any]) -> str | None:
    """The drafter's architecture, if only vLLM's own code runs it; None if we do, or nobody does.

    `config`: the drafter's `config.json`.
    """
    from transformers import PretrainedConfig
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils.configs.eagle import EAGLEConfig

    kind = config.get("speculators_model_type")
    if kind is not None:
        return "Qwen3DSparkModel" if kind == "dspark" else None
    written = config.get("architectures")
    if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
        return None
    known = ModelRegistry.get_supported_archs()
    if {*ARCHITECTURES} & set(written) or not known & set(written):
        return None
    # vLLM's renaming: a target's architecture becomes its drafter's.
    renamed = EAGLEConfig(
        PretrainedConfig(architectures=written), truncated_vocab_size=0, method="dflash"
    ).architectures
    return next((name for name in renamed if name in known and name not in ARCHITECTURES), None)


def config_of_drafter(requested: Mapping[str, Any]) -> dict[str, Any]:
    """The drafter's `config.json`; empty if the user named no drafter. Raises `DrafterError`.

    `requested`: the user's speculative config.
    """
    model = requested.get("model")
    if not model or not isinstance(model, str):
        return {}
    return load_config(_pulled(model), requested.get("revision"))


def _pulled(model: str) -> str:
    """vLLM's local folder for a drafter in object storage, after the files that are needed before
    its weights are streamed have been pulled, or that VLLM_MODEL_REDIRECT_PATH names for it; any
    other drafter unchanged."""
    from vllm.transformers_utils.runai_utils import ObjectStorageModel, is_runai_obj_uri
    from vllm.transformers_utils.utils import maybe_model_redirect

    model = maybe_model_redirect(model)
    if not is_runai_obj_uri(model):
        return model
    try:
        kept = ObjectStorageModel(url=model)
        kept.pull_files(model, allow_pattern=["*.json", MASK_EMBEDDING_FILE])
    except Exception as error:  # networks, stores and missing packages fail in many ways
        raise DrafterError(f"drafter {model!r}: vLLM cannot pull it: {error}") from error
    return kept.dir


def unsupported_reasons(
    requested: Mapping[str, Any],
    config: Mapping[str, Any],
    target: ModelConfig,
    target_parallel_config: ParallelConfig,
    *,
    has_watermark: bool = False,
    carries_options: bool = True,
) -> list[str]:
    """Every reason why vLLM's own DFlash runs this engine, with what would change it; empty if our
    code runs it.

    `requested`: the user's speculative config; `config`: the drafter's `config.json`;
    `carries_options`: whether our options can be added to vLLM's `additional_config`.
    """
    if not config:  # `SpeculativeSettings` refuses a missing drafter
        return []
    reasons = [
        *_drafter_reasons(requested, config),
        *_platform_reasons(target_parallel_config),
        *_engine_reasons(requested, target, target_parallel_config),
    ]
    if has_watermark and requested.get("draft_sample_method") == "probabilistic":
        reasons.append(
            "a watermark needs drafts that are sampled with it, and vllm-dflash has none"
            " (leave --watermark-config out)"
        )
    if not carries_options:
        reasons.append("additional_config is no dict, so ours cannot be added (pass a dict)")
    return reasons


def _drafter_reasons(requested: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    model, architecture = requested["model"], architecture_of_vllm(config)
    if architecture is not None:
        hint = ""
        if "DSpark" in architecture:
            hint = ' (for its whole method, DSpark, write "method": "dspark")'
        yield f"drafter {model!r} has architecture {architecture}, which vLLM's own code runs{hint}"
        return
    written = str(config_field(config, "architectures"))  # it may be of any type
    has_candidates = ARCHITECTURE_2 in written or ARCHITECTURE_LILICORR in written
    if has_candidates and (reason := vllm_unsupported_reason("candidates")):
        yield reason
    if config_field(config, "use_aux_hidden_state") is False:
        yield (
            f"drafter {model!r} has use_aux_hidden_state false: it reads the target's last hidden"
            " states instead of taps (use a drafter with taps)"
        )


def _platform_reasons(parallel: ParallelConfig) -> Iterator[str]:
    from vllm import envs
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield f"it runs on vLLM's CPU and CUDA platforms, not on {current_platform.device_name!r}"
        return
    if current_platform.is_cuda():
        # vLLM's choice: it splits batches in two only on V1, unless the user asks for V2.
        splits = envs.VLLM_USE_V2_MODEL_RUNNER is None and parallel.use_ubatching
        if splits or runner_here() == "v1":
            yield (
                "on CUDA it runs on Model Runner V2, and this engine gets V1 (leave out "
                f"{'--enable-dbo' if splits else 'VLLM_USE_V2_MODEL_RUNNER=0, and install Triton'})"
            )
        if uses_our_ray_executor(parallel) and (reason := vllm_unsupported_reason("ray")):
            yield reason
    if parallel.worker_cls not in ("auto", worker_here()):
        yield f"worker_cls is {parallel.worker_cls!r}, but it needs its own (leave worker_cls out)"


def _engine_reasons(
    requested: Mapping[str, Any], target: ModelConfig, parallel: ParallelConfig
) -> Iterator[str]:
    if parallel.pipeline_parallel_size > 1:
        yield (
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, but a drafter needs the"
            " embedding of the first stage and the head of the last (split the model by"
            " --tensor-parallel-size)"
        )
    if parallel.data_parallel_size > 1 and target.is_moe:
        yield (
            f"data_parallel_size is {parallel.data_parallel_size} and the target has experts, so"
            " its ranks step together: those that draft and those that do not would wait for each"
            " other (run a server for each replica, as in docs/ray_serve.md, or split the model by"
            " --tensor-parallel-size)"
        )
    size, backend = parallel.tensor_parallel_size, parallel.distributed_executor_backend
    is_timed = requested.get("draft_length") != "fixed"
    if backend == "external_launcher" and size > 1 and is_timed and runner_here() == "v2":
        yield (
            "distributed_executor_backend is 'external_launcher' and tensor_parallel_size is"
            f" {size}, so each rank schedules for itself, and draft lengths chosen by their own"
            ' clocks would differ (write "draft_length": "fixed")'
        )
    if requested.get("rejection_sample_method") == "fly":
        yield (
            "rejection_sample_method is 'fly', which accepts drafts that the target would not have"
            " written (leave rejection_sample_method out)"
        )
    yield from target_unsupported_reasons(target)


def target_unsupported_reasons(target: ModelConfig) -> Iterator[str]:
    """Reasons why vLLM's own DFlash runs engines with this target on this platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if target.is_multimodal_model:
        yield (
            f"target {target.model!r} is multimodal, which vllm-dflash runs on CUDA only (use a"
            " checkpoint of the text model alone, if there is one)"
        )
    if is_other_hybrid(target):
        yield (
            f"target {target.model!r} is a hybrid without gated delta nets, which vllm-dflash runs"
            " on CUDA only (on CPUs it runs Qwen3-Next and Qwen3.5)"
        )


def is_other_hybrid(target: ModelConfig) -> bool:
    """Whether this is a hybrid without gated delta nets, usually with Mamba layers."""
    return target.is_hybrid and not target.architecture.startswith(("Qwen3Next", "Qwen3_5"))


def leave_to_vllm(engine_args: EngineArgs, config: Mapping[str, Any], reasons: list[str]) -> None:
    """Remove our own options, fill in what vLLM needs, and log the `reasons` why.

    `config`: the drafter's `config.json`.
    """
    from vllm.logger import init_logger

    written = written_settings(engine_args)
    own = [key for key in OWN_KEYS if key in written]
    for key in own:
        del written[key]
    block_size = config_field(config, "block_size")
    asked = getattr(engine_args, "spec_tokens", None)
    if asked is None and isinstance(block_size, int) and block_size > 1:
        written.setdefault("num_speculative_tokens", block_size - 1)
    engine_args.speculative_config = written or None
    without = f", without {', '.join(map(repr, own))}, which it does not know" if own else ""
    init_logger("vllm.dflash").warning(
        "vllm-dflash stays out: %s. vLLM's own DFlash runs this engine%s.",
        "; ".join(reasons),
        without,
    )
