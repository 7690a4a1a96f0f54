"""Steps with one row per request get wrong attention in full graphs for any numbers of rows.

Wrong in vLLM 0.32.0 and 0.33.0, Model Runner V2. Adaptive verification has graphs for up to 1 + K
rows per request, `"cudagraph_mode": "FULL"` for any number. The metadata of a step must keep to the
number that its graph was captured for. `InputBatch.max_query_len` says so, but only with adaptive
verification, and only if drafts were scheduled. Otherwise FlashAttention 3 plans such a step for
one row per request, and the captured kernel misreads the plan: wrong text, or illegal memory
access. Seen on an H200. Not reported yet (docs/engineering/upstream.md). Delete this file when
`prepare_inputs` sets `max_query_len` for every batch that such a graph serves.
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
