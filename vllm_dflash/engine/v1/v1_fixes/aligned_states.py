"""Prefix caching with drafts ends the engine on CPU for targets with linear attention.

Delete this file when the kernels that copy their states have a CPU version
(docs/engineering/upstream.md#aligned_statespy).
"""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.gpu_input_batch import InputBatch

_preprocess = mamba_utils.preprocess_mamba


def fix_aligned_states() -> None:
    """Rebind both functions in this process, a CPU worker."""
    mamba_utils.preprocess_mamba = preprocess_mamba
    mamba_utils.postprocess_mamba_align_gpu = postprocess_mamba_align_gpu


@wraps(_preprocess, assigned=())
def preprocess_mamba(*args: Any, align_ctx: object = None) -> None:
    """Copy states before a step with vLLM's own host code, which it uses without drafts."""
    _preprocess(*args)


def postprocess_mamba_align_gpu(
    *,
    bufs: mamba_utils.MambaBuffers,
    num_reqs: int,
    num_accepted_tokens_gpu: torch.Tensor,
    num_accepted_tokens_cpu_tensor: torch.Tensor,
    input_batch: InputBatch,
    kv_cache_config: KVCacheConfig,
    forward_context: dict[str, Any],
    mamba_state_copy_funcs: Any,
) -> None:
    """Copy the state at the end of each block that a step filled to that block.

    The state after each of a request's rows is in a slot of its own, starting at number `columns`
    in the block table, where its first row was.
    """
    staged, copies = bufs.postprocess_align, bufs.preprocess
    columns, scheduled, computed, drafted = (
        buffer.np[:num_reqs].tolist()
        for buffer in (
            staged.mamba_state_idx_buf,
            staged.num_scheduled_tokens_buf,
            staged.num_computed_tokens_buf,
            staged.num_draft_tokens_buf,
        )
    )
    accepted = num_accepted_tokens_gpu[:num_reqs].tolist()
    copies.offset = 0
    for row, kept in enumerate(accepted):
        first = computed[row] + scheduled[row] - drafted[row]  # tokens up to the bonus token
        blocks = (first + kept - 1) // staged.block_size
        tokens_after_first = blocks * staged.block_size - first
        if tokens_after_first < 0:
            continue
        tables = {
            group: input_batch.block_table[group].get_numpy_array()[row]
            for group in copies.mamba_group_ids
        }
        mamba_utils.collect_mamba_copy_meta(
            copies,
            kv_cache_config,
            mamba_state_copy_funcs,
            copies.mamba_group_ids,
            columns[row],
            blocks - 1,
            tokens_after_first,
            SimpleNamespace(block_ids=tables),
            forward_context,
        )
        if columns[row] == blocks - 1:  # where the next step reads the state
            accepted[row] = 1
    mamba_utils.do_mamba_copy_block(copies)
    num_accepted_tokens_cpu_tensor[:num_reqs] = torch.tensor(accepted)
