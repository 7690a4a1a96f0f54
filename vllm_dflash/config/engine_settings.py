"""What DFlash sets in vLLM's own settings of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_dflash.config.mode import CPU_RAY_EXECUTOR, Mode, tree_sizes
from vllm_dflash.config.speculative_settings import IGNORED, written_settings
from vllm_dflash.config.thread_binding import check_thread_binding
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

MANY_REQUESTS = 1 << 16


def refuse(engine_args: EngineArgs, parallel: ParallelConfig) -> None:
    """Stop where an engine is asked for that nobody's can be: vLLM would stop as well, later.

    Raises:
        ValueError: with every reason.
    """
    from vllm.platforms import current_platform

    faults = []
    if engine_args.watermark_config is not None:
        faults.append(
            "a watermark needs drafts that are sampled. Leave --watermark-config out, leave the"
            ' speculative config out, or add "draft_sample_method": "probabilistic" to it: then'
            " vLLM's own DFlash runs the engine, from vLLM 0.33 on."
        )
    if parallel.distributed_executor_backend == "ray" and current_platform.is_cpu():
        faults.append(
            "vLLM's own Ray executor does not support CPUs. Set distributed_executor_backend to"
            f" '{CPU_RAY_EXECUTOR}', or to 'mp' for processes of this machine (which vLLM does not"
            " choose inside a placement group)."
        )
    if faults:
        raise ValueError(" ".join(faults))
    if parallel.distributed_executor_backend == "mp":
        check_thread_binding(parallel.local_world_size)


def refused_by_default(target: ModelConfig) -> str | None:
    """Reason why vLLM would refuse most requests with HTTP 400; None if it would not.

    A server applies the model's `generation_config.json` wherever a request leaves a field out.
    """
    value = target.get_diff_sampling_param().get("min_p")
    if not value:
        return None
    return (
        f"the default sampling settings (generation_config.json) set min_p to {value}, which vLLM"
        " refuses in any speculative decoding: requests that do not set min_p to 0 are answered"
        " with HTTP 400, unless their temperature is 0. Start with --override-generation-config"
        """ '{"min_p": 0}'"""
    )


def length_table(max_draft: int, num_nodes: int = 0) -> list[tuple[int, int, int]]:
    """A table of vLLM's that names the draft lengths to capture graphs for: 0, about 1/4, 1/2, K,
    and where a tree has more nodes than that, those, and what it may be cut to.

    vLLM takes a length from it by batch size; our schedulers choose among those lengths by what
    they bring, or give each request its own. Workers that can have vLLM trim each request's drafts
    on the device capture graphs of ragged batches instead (`engine/v2/trimming.py`): they know the
    attention backends, and nobody here does yet.

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
    if num_nodes > max_draft:
        *cuts, most = tree_sizes(num_nodes)
        lengths = [most, max_draft, 0, *reversed(cuts), *lengths[2:]]
    table = [(size, size, length) for size, length in enumerate(dict.fromkeys(lengths), start=1)]
    return [*table, (len(table) + 1, MANY_REQUESTS, lengths[0])]


def write_speculative_config(engine_args: EngineArgs, mode: Mode) -> None:
    """Write into the user's speculative config what vLLM needs and DFlash knows."""
    from vllm.logger import init_logger

    config = written_settings(engine_args)
    ignored = dict(IGNORED)
    if mode.drafter.num_candidates is not None:
        ignored["use_local_argmax_reduction"] = (
            "this drafter weighs several candidates for each token"
        )
    for key, why in ignored.items():
        if config.pop(key, None):
            init_logger("vllm.dflash").warning("%s is ignored: %s.", key, why)
    if mode.captures_lengths:
        config["num_speculative_tokens_per_batch_size"] = length_table(
            mode.draft_width, mode.tree_nodes
        )
    for key in OWN_KEYS:
        config.pop(key, None)
    if engine_args.spec_method is None:
        config["method"] = "dflash"
    if engine_args.spec_tokens is None:
        config["num_speculative_tokens"] = mode.num_speculative_tokens
    else:
        engine_args.spec_tokens = mode.num_speculative_tokens
    # vLLM checks for itself that a drafter divides.
    config["draft_tensor_parallel_size"] = mode.drafter_ranks
    if config.get("draft_sample_method") == "probabilistic":
        why = "DFlash predicts each position without knowing the ones before it, so sampling them"
        why += " independently ruins acceptance"
        if mode.drafter.num_candidates is not None:  # on V2, vLLM's own runs it
            why = "Model Runner V1 has no drafts of this drafter that are sampled"
        init_logger("vllm.dflash").warning(
            "draft_sample_method 'probabilistic' is ignored: %s. Drafts stay at the most likely"
            " token, which is lossless at any temperature.",
            why,
        )
        config["draft_sample_method"] = "greedy"
    # A prefix-cache hit restores the drafter's context with the target's, block by block: unlike
    # EAGLE's, its rows are not shifted by one token, so the last block need not be dropped.
    # Needless from vLLM 0.33 on, which never drops it for DFlash.
    config.setdefault("disable_eagle_block_drop", True)
    engine_args.speculative_config = config
