"""Graphs for all draft lengths, however few requests an engine takes.

vLLM captures graphs for the lengths in its table by batch size, which it cuts off at the largest
batch (`max_num_seqs`). With one request only K is left, so steps without drafts have no full graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu import cudagraph_utils

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def capture_all_lengths(runner: GPUModelRunner) -> None:
    """Make a runner plan graphs for all lengths of its table, also those of larger batches."""
    initialize = runner.initialize_kv_cache  # graphs are planned at its end

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> None:
        look_up = cudagraph_utils.build_dynamic_sd_schedule_lookup
        cudagraph_utils.build_dynamic_sd_schedule_lookup = _all_lengths
        try:
            initialize(*args, **kwargs)
        finally:
            cudagraph_utils.build_dynamic_sd_schedule_lookup = look_up

    runner.initialize_kv_cache = initialize_kv_cache


def _all_lengths(
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]],
    vllm_max_batch_size: int,
    vllm_num_speculative_tokens: int,
) -> list[int]:
    """Lengths in the table's order, after one entry that vLLM does not read."""
    return [0, *(length for *_, length in num_speculative_tokens_per_batch_size)]
