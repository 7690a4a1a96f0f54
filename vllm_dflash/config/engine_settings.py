"""What DFlash sets in vLLM's own settings of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_dflash.config.class_paths import CPU_WORKER, GPU_WORKER
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.speculative_settings import written_settings
from vllm_dflash.vllms_own import OWN_KEYS, SWITCH_OFF

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

MANY_REQUESTS = 1 << 16


def choose_worker(worker_cls: str) -> str:
    """The worker class for this platform.

    Raises:
        ValueError: another worker class was asked for, or the platform is not supported.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        ours = CPU_WORKER
    elif current_platform.is_cuda():
        ours = GPU_WORKER
    else:
        raise ValueError(
            "vllm-dflash supports vLLM's CPU and CUDA platforms, not"
            f" {current_platform.device_name!r}. {SWITCH_OFF}."
        )
    if worker_cls not in ("auto", ours):
        raise ValueError(
            f"method 'dflash' brings its own worker class, but worker_cls is {worker_cls!r}."
            f" Leave worker_cls out. {SWITCH_OFF}."
        )
    return ours


def choose_verification(options: DFlashOptions) -> dict[str, Any]:
    """Settings of vLLM's own that let draft lengths vary under CUDA graphs.

    Graphs are captured for a few lengths, which vLLM takes from a table by batch size; our
    schedulers choose among those lengths by what they bring, or give each request its own.
    Workers that can have vLLM trim each request's drafts on the device capture graphs of ragged
    batches instead (`engine/v2/trimming.py`): they know the attention backends, and nobody here
    does yet.
    """
    from vllm.platforms import current_platform

    if options.draft_length != "adaptive" or not current_platform.is_cuda():
        return {}
    return {"num_speculative_tokens_per_batch_size": length_table(options.draft_width)}


def length_table(max_draft: int) -> list[tuple[int, int, int]]:
    """A table of vLLM's that names the draft lengths to capture graphs for: 0, about 1/4, 1/2, K.

    With its bonus token a request has a quarter or half of the block's rows. A batch finds a graph
    only among those of the next size that has any, and blocks are powers of two: then sizes, which
    are multiples of 8, suit all lengths alike, and every batch finds one.

    vLLM cuts the table off at the engine's largest batch, and captures more sizes for lengths that
    have many batch sizes. So K and 0 come first, and K has all that is left over. At run time the
    batch sizes mean nothing.
    """
    rows = 1 + max_draft
    between = {rows // 4 - 1, rows // 2 - 1} - {-1, 0, max_draft}
    lengths = [max_draft, 0, *sorted(between, reverse=True)]
    table = [(size, size, length) for size, length in enumerate(lengths, start=1)]
    return [*table, (len(table) + 1, MANY_REQUESTS, max_draft)]


def write_speculative_config(
    engine_args: EngineArgs, options: DFlashOptions, verification: Mapping[str, Any]
) -> None:
    """Write into the user's speculative config what vLLM needs and DFlash knows."""
    config = {**written_settings(engine_args), **verification}
    for key in OWN_KEYS:
        config.pop(key, None)
    if engine_args.spec_method is None:
        config["method"] = "dflash"
    if engine_args.spec_tokens is None:
        config["num_speculative_tokens"] = options.num_speculative_tokens
    # vLLM checks for itself that a drafter divides.
    config["draft_tensor_parallel_size"] = options.drafter_ranks
    if config.get("draft_sample_method") == "probabilistic":
        warn_about_sampling()
        config["draft_sample_method"] = "greedy"
    # A prefix-cache hit restores the drafter's context with the target's, block by block: unlike
    # EAGLE's, its rows are not shifted by one token, so the last block need not be dropped.
    # Needless from vLLM 0.33 on, which never drops it for DFlash.
    config.setdefault("disable_eagle_block_drop", True)
    engine_args.speculative_config = config


def warn_about_sampling() -> None:
    """Say why drafts are not sampled."""
    from vllm.logger import init_logger

    init_logger("vllm.dflash").warning(
        "draft_sample_method 'probabilistic' is ignored: DFlash predicts each position without"
        " knowing the ones before it, so sampling them independently ruins acceptance. Drafts"
        " stay at the most likely token, which is lossless at any temperature."
    )
