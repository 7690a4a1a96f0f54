"""On V2, steps of one row per request get wrong attention in graphs for any number of rows.

Delete this file when `prepare_inputs` sets `max_query_len` for every batch of such a graph
(docs/engineering/upstream.md#undrafted_graphspy).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def fix_undrafted_graphs(runner: GPUModelRunner) -> None:
    """Make the metadata of a runner's steps keep to the bound of their graphs."""
    state = runner.model_state
    prepare = state.prepare_attn

    def prepare_attn(
        batch: InputBatch, mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if mode == CUDAGraphMode.FULL:
            if runner.adaptive_verification is not None:
                batch.max_query_len = runner.decode_query_len
            elif runner.cudagraph_manager.cudagraph_mode == CUDAGraphMode.FULL:
                batch.max_query_len = batch.num_tokens_after_padding
        return prepare(batch, mode, *args, **kwargs)

    state.prepare_attn = prepare_attn
