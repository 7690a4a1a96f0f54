"""Decode steps without drafts get wrong attention in graphs for adaptive verification.

Wrong in vLLM 0.32.0 and 0.33.0, Model Runner V2. Such a graph is captured for up to 1 + K rows per
request. The metadata of a step must keep to this bound, and `InputBatch.max_query_len` says so, but
only if drafts were scheduled. For a step without drafts, FlashAttention 3 plans one row per
request, and the captured kernel misreads the plan: wrong text, or illegal memory access. Seen on an
H200. Not reported yet (docs/engineering/upstream.md). Delete this file when `prepare_inputs` sets
`max_query_len` for every batch that such a graph serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def fix_undrafted_graphs(runner: GPUModelRunner) -> None:
    """Make metadata keep to the graphs' bound, in a runner with adaptive verification.

    Its full graphs serve only batches that decode.
    """
    state, most_rows = runner.model_state, runner.decode_query_len
    prepare = state.prepare_attn

    def prepare_attn(
        batch: InputBatch, mode: CUDAGraphMode, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        if mode == CUDAGraphMode.FULL:
            batch.max_query_len = most_rows
        return prepare(batch, mode, *args, **kwargs)

    state.prepare_attn = prepare_attn
