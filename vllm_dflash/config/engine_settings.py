"""vLLM settings that DFlash checks and fills in."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.config.engine_options import (
    ADDITIONAL_CONFIG_KEY,
    CPU_RAY_EXECUTOR,
    CPU_WORKER_V2,
    SCHEDULER,
    EngineOptions,
    from_json,
    tree_sizes,
    uses_rust_front_end,
    worker_here,
)
from vllm_dflash.config.speculative_settings import IGNORED, written_settings
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

MANY_REQUESTS = 1 << 16
SHORT_ENOUGH = 64
"""Drafts that a block may have, however few rows a step has. Published drafters have up to 16."""


def remove_our_settings(engine_args: EngineArgs) -> None:
    """Remove what we wrote into these arguments, if another config was made from them before."""
    given = getattr(engine_args, "additional_config", None)
    if not isinstance(given, dict) or ADDITIONAL_CONFIG_KEY not in given:
        return
    others = dict(given)
    written = others.pop(ADDITIONAL_CONFIG_KEY)
    engine_args.additional_config = others
    if from_json(written).runner == "v1" and engine_args.disable_hybrid_kv_cache_manager:
        engine_args.disable_hybrid_kv_cache_manager = None  # on V1 it is set again
    if engine_args.scheduler_cls == SCHEDULER:
        engine_args.scheduler_cls = None


def refuse(engine_args: EngineArgs, parallel: ParallelConfig) -> None:
    """Refuse settings that neither we nor vLLM can run; vLLM alone would stop later.

    Raises:
        ValueError: lists every reason.
    """
    from vllm.platforms import current_platform

    faults = []
    if engine_args.watermark_config is not None:
        faults.append(
            "a watermark needs drafts that are sampled with it. Leave --watermark-config out, leave"
            ' the speculative config out, or add "draft_sample_method": "probabilistic" to it: then'
            " vLLM's own DFlash runs the engine (vLLM 0.33 and later)."
        )
    if parallel.distributed_executor_backend == "ray" and current_platform.is_cpu():
        faults.append(
            "vLLM's own Ray executor does not support CPUs. Set distributed_executor_backend to"
            f" '{CPU_RAY_EXECUTOR}', or to 'mp' for processes on this machine (vLLM does not"
            " choose 'mp' by itself inside a placement group)."
        )
    if faults:
        raise ValueError(" ".join(faults))


def choose_step_size(
    engine_args: EngineArgs, target: ModelConfig, parallel: ParallelConfig
) -> None:
    """Write vLLM's defaults of `max_num_batched_tokens` and `max_num_seqs` into the arguments now,
    where drafts depend on them: with LoRA, and without chunked prefill."""
    if engine_args.enable_lora or engine_args.enable_chunked_prefill is False:
        _write_step_size(engine_args, target, parallel)


def _write_step_size(
    engine_args: EngineArgs, target: ModelConfig, parallel: ParallelConfig
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    is_server = isinstance(engine_args, AsyncEngineArgs)
    starter = UsageContext.OPENAI_API_SERVER if is_server else UsageContext.LLM_CLASS
    engine_args._set_default_max_num_seqs_and_batched_tokens_args(starter, target, parallel)


def longest_draft(
    width: int,
    engine_args: EngineArgs,
    target: ModelConfig,
    parallel: ParallelConfig,
    *,
    is_asked: bool,
) -> int:
    """Return how long drafts of up to `width` tokens may be. Call `choose_step_size` first.

    A block and a token before it fit the longest request. Unless the user asks for a number, a step
    also has rows for blocks of as many requests as it admits, which vLLM always wants with LoRA.

    Raises:
        ValueError: with LoRA, a step has no rows for drafts.
    """
    from vllm.logger import init_logger

    length = target.max_model_len
    longest, reason = max(length - 2, 1), f"max_model_len is {length}"
    limits = [(longest, reason)]
    if engine_args.enable_lora:
        limits.append(_limit_with_lora(min(width, longest), engine_args))
    elif not is_asked and width > SHORT_ENOUGH:
        limits.append(_limit_of_step(engine_args, target, parallel))
    longest, reason = min(limits)
    if longest < width:
        init_logger("vllm.dflash").warning_once(
            "drafts have up to %d tokens, not %d: %s.", longest, width, reason
        )
    return min(width, longest)


def _limit_of_step(
    engine_args: EngineArgs, target: ModelConfig, parallel: ParallelConfig
) -> tuple[int, str]:
    step = copy.copy(engine_args)
    _write_step_size(step, target, parallel)
    rows, most = step.max_num_batched_tokens, step.max_num_seqs
    assert rows is not None
    assert most is not None
    return max(rows // most - 1, SHORT_ENOUGH), (
        f"a step has {rows} rows (max_num_batched_tokens) for {most} requests (max_num_seqs)."
        " num_speculative_tokens in the speculative config sets another number"
    )


def _limit_with_lora(width: int, engine_args: EngineArgs) -> tuple[int, str]:
    rows, most = engine_args.max_num_batched_tokens, engine_args.max_num_seqs
    assert rows is not None
    assert most is not None
    fewer = f" or --max-num-seqs {rows // (1 + width)}" if rows > width else ""
    reason = (
        f"with LoRA, vLLM needs 1 + K rows in a step for each of {most} requests (max_num_seqs), K"
        f" being the longest draft, and has {rows} (max_num_batched_tokens):"
        f" --max-num-batched-tokens {most * (1 + width)}{fewer} has room for {width}"
    )
    if rows // most < 2:
        raise ValueError(f"{reason}.")
    return rows // most - 1, reason


def make_room_for_prompts(engine_args: EngineArgs, target: ModelConfig, longest: int) -> None:
    """Without chunked prefill, let the longest prompt fit a step beside the rows that vLLM 0.32
    keeps for drafts, `longest` tokens at most. Otherwise that prompt waits for ever. Call
    `choose_step_size` first."""
    if engine_args.enable_chunked_prefill is not False:
        return
    rows, length = engine_args.max_num_batched_tokens, target.max_model_len
    assert rows is not None
    if rows >= length:  # vLLM refuses fewer
        engine_args.max_num_batched_tokens = max(rows, length + longest)


def remarks(engine_args: EngineArgs, target: ModelConfig, options: EngineOptions) -> Iterator[str]:
    """Yield warnings for the log."""
    from vllm import envs

    for remark in options.drafter.remarks:
        yield f"drafter {options.drafter.model!r}: {remark}"
    # A server applies the model's `generation_config.json` to fields that a request leaves out.
    if min_p := target.get_diff_sampling_param().get("min_p"):
        yield (
            f"the default sampling settings (generation_config.json) set min_p to {min_p}, which"
            " vLLM refuses with any speculative decoding: requests that do not set min_p to 0 get"
            " HTTP 400, unless their temperature is 0. Start with --override-generation-config"
            """ '{"min_p": 0}'."""
        )
    modules = engine_args.lora_target_modules
    wraps_head = engine_args.enable_lora and (modules is None or "lm_head" in modules)
    if wraps_head and options.runner == "v2":
        yield (
            "adapters that train lm_head give wrong text beside drafts, with vLLM's own DFlash too:"
            " Model Runner V2 applies them to the wrong rows. --lora-target-modules without lm_head"
            " keeps them out."
        )
    if uses_rust_front_end():
        yield (
            "VLLM_USE_RUST_FRONTEND is set: vllm:dflash_* metrics are missing there, and a wrong"
            " 'dflash' option of a request is not refused (docs/compatibility.md)."
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER is None and worker_here() == CPU_WORKER_V2:
        yield (
            "vLLM selects Model Runner V2 on this CPU, as Triton is installed. vllm-dflash is"
            " measured on V1 there: VLLM_USE_V2_MODEL_RUNNER=0 selects it."
        )


def length_table(max_draft: int, num_nodes: int = 0) -> list[tuple[int, int, int]]:
    """vLLM's table of draft lengths by batch size, which makes it capture graphs for these lengths:
    0, about K/4, K/2 and K, and if a tree has more nodes than K, its sizes (`tree_sizes`).

    vLLM looks up a length by batch size; our schedulers choose among the lengths by their expected
    gain, or give each request its own. With vLLM's adaptive verification, workers capture graphs of
    ragged batches instead.

    With the bonus token, a request has a quarter or half of the block's rows. A batch finds a graph
    only among those of the next captured size, and blocks are powers of two: then sizes, which
    are multiples of 8, fit all lengths, and every batch finds a graph.

    vLLM cuts the table off at the engine's largest batch, and captures more sizes for lengths with
    many batch sizes. So the largest length, K and 0 come first, and the first one gets all
    remaining batch sizes. At run time the batch sizes have no meaning.
    """
    rows = 1 + max_draft
    between = {rows // 4 - 1, rows // 2 - 1} - {-1, 0, max_draft}
    lengths = [max_draft, 0, *sorted(between, reverse=True)]
    if num_nodes > max_draft:
        *cuts, most = tree_sizes(num_nodes)
        lengths = [most, max_draft, 0, *reversed(cuts), *lengths[2:]]
    table = [(size, size, length) for size, length in enumerate(dict.fromkeys(lengths), start=1)]
    return [*table, (len(table) + 1, MANY_REQUESTS, lengths[0])]


def write_speculative_config(engine_args: EngineArgs, options: EngineOptions) -> None:
    """Fill in the user's speculative config for vLLM, and remove what DFlash ignores."""
    from vllm.logger import init_logger

    config = written_settings(engine_args)
    for key, reason in IGNORED.items():
        if config.pop(key, None):
            init_logger("vllm.dflash").warning("%s is ignored: %s.", key, reason)
    if options.captures_lengths:
        config["num_speculative_tokens_per_batch_size"] = length_table(
            options.draft_width, options.tree_nodes
        )
    for key in OWN_KEYS:
        config.pop(key, None)
    if engine_args.spec_method is None:
        config["method"] = "dflash"
    if engine_args.spec_tokens is None:
        config["num_speculative_tokens"] = options.num_speculative_tokens
    else:
        engine_args.spec_tokens = options.num_speculative_tokens
    # vLLM wants a rate for each draft; slots of a tree that have none get that of the last one.
    if rates := config.get("synthetic_acceptance_rates"):
        more = [rates[-1]] * (options.num_speculative_tokens - len(rates))
        config["synthetic_acceptance_rates"] = [*rates, *more][: options.num_speculative_tokens]
    # vLLM itself also checks that the drafter divides by this number.
    config["draft_tensor_parallel_size"] = options.drafter_ranks
    if config.get("draft_sample_method") == "probabilistic":
        if drawing := _drawing_unsupported_reason(config, engine_args, options):
            init_logger("vllm.dflash").warning(
                "draft_sample_method 'probabilistic' is ignored: %s. Drafts are the most likely"
                " tokens, which is lossless at any temperature.",
                drawing,
            )
        # vLLM would keep the logits of all drafts; ours are drawn without.
        config["draft_sample_method"] = "greedy"
    # A prefix-cache hit restores the drafter's context with the target's, block by block: unlike
    # EAGLE's, its rows are not shifted by one token, so the last block need not be dropped.
    # Not needed with vLLM 0.33, which never drops it for DFlash.
    config.setdefault("disable_eagle_block_drop", True)
    engine_args.speculative_config = config


def _drawing_unsupported_reason(
    config: Mapping[str, Any], engine_args: EngineArgs, options: EngineOptions
) -> str | None:
    """Why drafts are not drawn, although the user asks for it; None if they are."""
    if getattr(engine_args, "enable_batch_sharded_sampling", None):
        return "drafts are not drawn where ranks share the sampling of a batch"
    if config.get("rejection_sample_method", "standard") != "standard":
        return "drafts are drawn only with the rejection_sample_method 'standard'"
    if options.tree_nodes:
        return "draft trees have the most likely tokens"
    return None if options.draws_drafts else "Model Runner V1 cannot draw drafts"
