"""`method: "dflash"`: from what the user wrote to a checked pair, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.mask_embedding import check_mask_embedding
from vllm_dflash.checkpoint.pairing import TargetFacts, check_pair
from vllm_dflash.checkpoint.ranks import drafter_ranks
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import check_tensors, read_headers
from vllm_dflash.config.options import (
    OWN_KEYS,
    DFlashOptions,
    check_keys,
    resolve_draft_length,
    resolve_drafter_overrides,
    resolve_num_speculative_tokens,
    written_options,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


def requested_options(engine_args: EngineArgs) -> dict[str, Any] | None:
    """What the user asked of DFlash, whichever flags it came by; None for any other method."""
    requested = written_options(engine_args)
    for key, value in (
        ("method", engine_args.spec_method),
        ("model", engine_args.spec_model),
        ("num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None:
            requested.setdefault(key, value)
    method = requested.get("method")
    # Without a method, vLLM takes a drafter with this in its name for a DFlash one.
    guessed = method is None and "dflash" in str(requested.get("model", "")).lower()
    return requested if method == "dflash" or guessed else None


def resolve(
    requested: Mapping[str, Any],
    target: ModelConfig,
    parallel: ParallelConfig | None = None,
) -> DFlashOptions:
    """Check the options, the drafter and the pair.

    Raises:
        ValueError: (`DrafterError` included) with a message that says what to change.
    """
    from vllm.config import SpeculativeConfig

    check_keys(requested, OWN_KEYS | {field.name for field in fields(SpeculativeConfig)})
    model = requested.get("model")
    if not model:
        raise DrafterError(
            "method 'dflash' needs a drafter: add 'model' to the speculative config, for example"
            ' {"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16"}.'
        )
    overrides = resolve_drafter_overrides(requested.get("drafter_overrides"))
    drafter = read_drafter(model, requested.get("revision"), overrides)
    check_pair(drafter, target_facts(target, parallel))
    if Path(model).is_dir():
        check_tensors(drafter, read_headers(Path(model)))
        check_mask_embedding(drafter, Path(model))
    num_speculative_tokens = resolve_num_speculative_tokens(
        requested.get("num_speculative_tokens"), drafter
    )
    draft_length = resolve_draft_length(requested.get("draft_length"))
    tp_size = parallel.tensor_parallel_size if parallel else 1
    ranks = drafter_ranks(drafter, tp_size, requested.get("draft_tensor_parallel_size"))
    return DFlashOptions(num_speculative_tokens, draft_length, drafter, ranks)


def target_facts(target: ModelConfig, parallel: ParallelConfig | None) -> TargetFacts:
    """Read what pairing needs from vLLM's own configs; imports the target's model class."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.platforms import current_platform

    model_class, architecture = target.registry.resolve_model_cls(
        target.architectures, model_config=target
    )
    return TargetFacts(
        model=target.model,
        architecture=architecture,
        num_layers=target.get_total_num_hidden_layers(),
        hidden_size=target.get_hidden_size(),
        vocab_size=target.get_vocab_size(),
        supports_taps=supports_eagle3(model_class),
        multimodal=target.is_multimodal_model,
        has_linear_attention=target.is_hybrid,
        on_cpu=current_platform.is_cpu(),
        pipeline_parallel_size=parallel.pipeline_parallel_size if parallel else 1,
        data_parallel_size=parallel.data_parallel_size if parallel else 1,
    )


def choose_worker(worker_cls: str) -> str:
    """The worker class for this platform.

    Raises:
        ValueError: another worker class was asked for, or the platform is not supported.
    """
    from vllm.platforms import current_platform

    from vllm_dflash.plugin import CPU_WORKER, GPU_WORKER

    if current_platform.is_cpu():
        ours = CPU_WORKER
    elif current_platform.is_cuda():
        ours = GPU_WORKER
    else:
        raise ValueError(
            "vllm-dflash supports vLLM's CPU and CUDA platforms, not"
            f" {current_platform.device_name!r}. Set VLLM_PLUGINS='' for vLLM's own DFlash."
        )
    if worker_cls not in ("auto", ours):
        raise ValueError(
            f"method 'dflash' brings its own worker class, but worker_cls is {worker_cls!r}."
            " Leave worker_cls out, or set VLLM_PLUGINS='' to run without vllm-dflash."
        )
    return ours


def choose_verification(engine_args: EngineArgs, options: DFlashOptions) -> dict[str, Any]:
    """Settings of vLLM's own that let draft lengths vary under CUDA graphs.

    Adaptive verification trims each request's drafts on the device; its graphs take ragged
    batches. Where it does not hold, graphs are captured for a few lengths, which vLLM takes from
    a table by batch size; our scheduler chooses among those lengths by what they bring.
    """
    from vllm.platforms import current_platform

    is_planned_in_worker = engine_args.async_scheduling is False
    if options.draft_length != "adaptive" or is_planned_in_worker or not current_platform.is_cuda():
        return {}
    written = written_options(engine_args)
    compilation = engine_args.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    has_full_graphs = not engine_args.enforce_eager and (mode is None or mode.has_full_cudagraphs())
    if "enable_adaptive_verification" not in written and has_full_graphs:
        return {"enable_adaptive_verification": True}
    if written.get("enable_adaptive_verification") or not has_full_graphs:
        return {}
    return {"num_speculative_tokens_per_batch_size": length_table(options.num_speculative_tokens)}


def length_table(max_draft: int) -> list[tuple[int, int, int]]:
    """A table of vLLM's that names the draft lengths to capture graphs for: 0, about 1/4, 1/2, K.

    Which batch sizes stand beside them means nothing.
    """
    lengths = sorted({0, round(max_draft / 4), round(max_draft / 2), max_draft}, reverse=True)
    return [(size, size, length) for size, length in enumerate(lengths, start=1)]


@contextmanager
def trusting_no_code(target: ModelConfig) -> Iterator[None]:
    """While vLLM reads the drafter's config: `trust_remote_code` is for the target alone.

    vLLM hands the target's setting down to the drafter, whose `auto_map` could then name a file of
    its folder to be imported. A DFlash drafter is data: no code of its checkpoint is of use to us.
    """
    trusted, target.trust_remote_code = target.trust_remote_code, False
    try:
        yield
    finally:
        target.trust_remote_code = trusted


def describe_to_vllm(config: SpeculativeConfig, drafter: DrafterSpec) -> SpeculativeConfig:
    """Say in vLLM's copy of the draft config what vLLM itself reads there, in its own words.

    Taps and mask token, which checkpoints keep in several places. And `layer_types`: vLLM refuses
    drafters that mix sliding and full layers on the V1 runner for needing several cache groups;
    ours keeps all layers in one and takes its windows from `DrafterSpec`.
    """
    draft = config.draft_model_config
    for hf_config in (draft.hf_config, draft.hf_text_config):
        nested = dict(getattr(hf_config, "dflash_config", None) or {})
        nested |= {"mask_token_id": drafter.mask_token_id, "target_layer_ids": list(drafter.taps)}
        hf_config.dflash_config = nested
        if getattr(hf_config, "layer_types", None):
            hf_config.layer_types = ["full_attention"] * len(hf_config.layer_types)
    return config
