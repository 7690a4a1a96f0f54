"""Resolves the user's settings to a checked pair and `EngineOptions`, before any process starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.architectures import check_not_swapped
from vllm_dflash.checkpoint.headers import HeadersError, read_folder
from vllm_dflash.checkpoint.pairing import PairingTarget, adapt_to_target, check_pair, drafter_ranks
from vllm_dflash.checkpoint.read import config_field, parse_overridden
from vllm_dflash.checkpoint.spec import MOST_ROWS, DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import MASK_EMBEDDING_FILE, check_tensors, parse_mask_embedding
from vllm_dflash.config.engine_options import MOST_FREE_DRAFTS, EngineOptions, Runner, runner_here
from vllm_dflash.config.engine_settings import longest_draft
from vllm_dflash.config.left_to_vllm import is_other_hybrid
from vllm_dflash.config.speculative_settings import AUTO_NODES, SpeculativeSettings
from vllm_dflash.config.target_class import provides_hidden_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs


def resolve(
    settings: SpeculativeSettings,
    config: dict[str, Any],
    target: ModelConfig,
    engine_args: EngineArgs,
    parallel: ParallelConfig,
) -> EngineOptions:
    """Check the drafter and the pair, and decide how they run.

    `config`: the drafter's `config.json`.

    Raises:
        ValueError: (`DrafterError` included) the message says what to change.
    """
    from vllm.platforms import current_platform

    drafter = checked_drafter(settings, config, target, engine_args)
    runner, is_planned = runner_here(), settings.draft_length == "adaptive"
    asked = settings.num_speculative_tokens
    is_our_scheduler = engine_args.scheduler_cls is None
    most_rows = target.max_model_len * (engine_args.max_num_seqs or MOST_FREE_DRAFTS)
    step_rows = engine_args.max_num_batched_tokens or most_rows
    # Free drafts may be longer than a block, except
    # - on V2, whose buffers are one block wide;
    # - with the user's scheduler, which would reserve that much room for each request;
    # - if a step lacks the rows; with LoRA, vLLM needs rows for the drafts of all requests;
    # - for hybrid targets, where every draft takes the memory of a whole state;
    # - if the user asks for a number of drafts.
    is_free_to_choose = (
        runner == "v1"
        and is_our_scheduler
        and step_rows > MOST_FREE_DRAFTS
        and not target.is_hybrid
        and not engine_args.enable_lora
        and asked is None
    )
    width, most_free = settings.draft_tokens(drafter), 0
    width = longest_draft(width, engine_args, target, parallel, is_asked=asked is not None)
    if is_planned and settings.free_drafts != "off":
        most_free = max(width, MOST_FREE_DRAFTS) if is_free_to_choose else width
    nodes = tree_nodes(settings, drafter, target, engine_args, runner)
    ranks = settings.draft_tensor_parallel_size
    return EngineOptions(
        num_speculative_tokens=max(width, most_free, nodes),
        draft_width=width,
        draft_length=settings.draft_length,
        drafter=drafter,
        drafter_ranks=drafter_ranks(drafter, parallel.tensor_parallel_size, ranks),
        most_free=most_free,
        # Another scheduler would apply the table literally, and vLLM drops it with data
        # parallelism. For Mamba layers, vLLM captures only full lengths.
        captures_lengths=current_platform.is_cuda()
        and is_planned
        and is_our_scheduler
        and parallel.data_parallel_size == 1
        and not is_other_hybrid(target),
        runner=runner,
        draws_drafts=runner == "v2" and settings.draft_sample_method != "greedy",
        tree_nodes=nodes,
        most_active=engine_args.max_num_active_seqs,
    )


def tree_nodes(
    settings: SpeculativeSettings,
    drafter: DrafterSpec,
    target: ModelConfig,
    engine_args: EngineArgs,
    runner: Runner,
) -> int:
    """Maximum number of nodes in a draft tree; 0: chains, with a log line if the user wants trees.

    Other obstacles are known only after the models are loaded (`engine/v2/trees/draft_trees.py`).
    """
    from vllm.logger import init_logger

    if settings.draft_tree == "off":
        return 0
    for obstacle, is_so in (
        ("Model Runner V1, which CPUs use, supports only chains", runner == "v1"),
        ("this drafter's candidates depend on each other", drafter.num_candidates is not None),
        ("scheduler_cls is set", engine_args.scheduler_cls is not None),
        ("the target is a hybrid, whose states cannot branch", target.is_hybrid),
        ("LoRA is on", engine_args.enable_lora),
    ):
        if is_so:
            init_logger("vllm.dflash").warning("drafts are chains, not trees: %s.", obstacle)
            return 0
    return AUTO_NODES if settings.draft_tree == "auto" else settings.draft_tree


def loads_weights(settings: SpeculativeSettings, engine_args: EngineArgs) -> bool:
    """Whether the drafter's weights are read, and not made up (`load_format` "dummy")."""
    own = settings.draft_load_config
    if own is None:
        return engine_args.load_format != "dummy"
    given = own.get("load_format") if isinstance(own, dict) else own.load_format
    return given != "dummy"


def checked_drafter(
    settings: SpeculativeSettings,
    config: dict[str, Any],
    target: ModelConfig,
    engine_args: EngineArgs,
) -> DrafterSpec:
    """The drafter, checked against the target; if it is a folder, its files are checked too.

    Raises:
        DrafterError: the message says what to change.
    """
    check_not_swapped(
        settings.model, config, target.model, {"architectures": list(target.architectures)}
    )
    overrides, asked = settings.drafter_overrides, settings.num_speculative_tokens
    if asked and config_field(config, "block_size", overrides) is None:
        # vLLM does not need the field.
        if asked >= MOST_ROWS:
            raise DrafterError(
                f"drafter {settings.model!r}: config.json has no block_size, so it would be 1 +"
                f" num_speculative_tokens, which is {asked}: blocks have up to {MOST_ROWS} rows."
                " Set num_speculative_tokens in the speculative config to what the drafter was"
                ' trained for, or add "drafter_overrides": {"block_size": B} to it.'
            )
        overrides = {"block_size": 1 + asked, **overrides}
    facts = target_facts(target)
    drafter = adapt_to_target(parse_overridden(settings.model, config, overrides), facts)
    check_pair(drafter, facts)
    if Path(settings.model).is_dir() and loads_weights(settings, engine_args):
        check_weights(drafter, Path(settings.model))
    return drafter.model_copy(update={"draft_window": settings.draft_window})


def check_weights(drafter: DrafterSpec, folder: Path) -> None:
    """Refuse a folder whose files do not fit this drafter. Raises `DrafterError`."""
    try:
        headers = read_folder(folder)
    except HeadersError as error:
        reason = str(error).removesuffix(".")
        raise DrafterError(f"drafter {drafter.model!r}: {reason}.") from None
    check_tensors(drafter, headers.tensors)
    if (file := folder / MASK_EMBEDDING_FILE).is_file():
        parse_mask_embedding(drafter, file.read_bytes())


def target_facts(target: ModelConfig) -> PairingTarget:
    """Facts that pairing needs, from vLLM's config of the target."""
    from vllm.platforms import current_platform

    # Some targets have one base for each layer or layer type.
    base = (getattr(target.hf_text_config, "rope_parameters", None) or {}).get("rope_theta")
    return PairingTarget(
        model=target.model,
        architecture=target.architecture,
        num_layers=target.get_total_num_hidden_layers(),
        hidden_size=target.get_hidden_size(),
        vocab_size=target.get_vocab_size(),
        supports_taps=provides_hidden_states(target),
        on_cpu=current_platform.is_cpu(),
        rope_theta=base if isinstance(base, int | float) else None,
    )
