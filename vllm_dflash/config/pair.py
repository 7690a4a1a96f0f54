"""From what the user wrote to a checked pair, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.headers import HeadersError, missing_weights, read_folder
from vllm_dflash.checkpoint.mask_embedding import check_mask_embedding
from vllm_dflash.checkpoint.pairing import PairingTarget, check_pair
from vllm_dflash.checkpoint.ranks import drafter_ranks
from vllm_dflash.checkpoint.read import check_not_swapped, parse_overridden
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import check_tensors
from vllm_dflash.config.estimates_folder import usable_folder
from vllm_dflash.config.mode import MOST_FREE_DRAFTS, Mode
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.speculative_settings import SpeculativeSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig


def resolve(
    settings: SpeculativeSettings,
    config: dict[str, Any],
    target: ModelConfig,
    parallel: ParallelConfig,
    mode: Mode,
) -> DFlashOptions:
    """Check the drafter and the pair.

    Args:
        settings: what the user wrote.
        config: the drafter's `config.json`.
        target: vLLM's config of it.
        parallel: of the target.
        mode: what is to run it.

    Raises:
        ValueError: (`DrafterError` included) with a message that says what to change.
    """
    check_not_swapped(
        settings.model, config, target.model, {"architectures": list(target.architectures)}
    )
    drafter = parse_overridden(settings.model, config, settings.drafter_overrides)
    check_pair(drafter, target_facts(target, parallel))
    if drafter.dflash2 is not None and settings.use_local_argmax_reduction:
        raise DrafterError(
            f"drafter {drafter.model!r} is a DFlash 2 one, which weighs several candidates for each"
            " token: remove 'use_local_argmax_reduction' from the speculative config."
        )
    if settings.free_drafts == "shared":
        check_shared(mode)
    if Path(settings.model).is_dir():
        check_weights(drafter, Path(settings.model))
    folder, width = settings.estimates_folder, settings.draft_tokens(drafter)
    free_drafts = settings.free_drafts != "off" and mode.is_planned
    # Of a linear-attention target, every draft takes a whole state of memory. And who asks for a
    # number of drafts gets no more.
    has_room = mode.allows_long_drafts and not target.is_hybrid
    is_free_to_choose = has_room and settings.num_speculative_tokens is None
    most_free = (max(width, MOST_FREE_DRAFTS) if is_free_to_choose else width) if free_drafts else 0
    return DFlashOptions(
        max(width, most_free),
        width,
        settings.draft_length,
        drafter,
        drafter_ranks(drafter, parallel.tensor_parallel_size, settings.draft_tensor_parallel_size),
        most_free=most_free,
        shares_outputs=settings.free_drafts == "shared",
        runner=mode.runner,
        may_trim=settings.enable_adaptive_verification is not False,
        estimates_folder=None if folder is None else usable_folder(folder),
    )


def check_shared(mode: Mode) -> None:
    """Refuse to share answers where they are not looked up. Raises `ValueError`."""
    if not mode.is_planned:
        raise ValueError(
            "free_drafts is 'shared', but with draft_length 'fixed' no text is looked up: leave one"
            " of the two out of the speculative config."
        )
    if mode.runner == "v2":
        raise ValueError(
            "free_drafts is 'shared', but Model Runner V2, which GPUs have, looks up each request's"
            " own text alone: leave 'free_drafts' out of the speculative config to get that."
        )


def check_weights(drafter: DrafterSpec, folder: Path) -> None:
    """Refuse a folder whose files are not those of this drafter. Raises `DrafterError`."""
    try:
        headers = read_folder(folder)
    except HeadersError as error:
        why = str(error).removesuffix(".")
        raise DrafterError(f"drafter {drafter.model!r}: {why}.{missing_weights(folder)}") from None
    check_tensors(drafter, headers.tensors)
    check_mask_embedding(drafter, folder)


def target_facts(target: ModelConfig, parallel: ParallelConfig | None) -> PairingTarget:
    """Read what pairing needs from vLLM's own configs; imports the target's model class."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.platforms import current_platform

    model_class, architecture = target.registry.resolve_model_cls(
        target.architectures, model_config=target
    )
    return PairingTarget(
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
