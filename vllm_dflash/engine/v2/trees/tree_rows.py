"""Positions of draft trees' rows: nodes of equal depth share a position, but not a K/V slot.

vLLM gives a request's rows consecutive positions and K/V slots. The slots stay, since attention
uses the trees' masks. Only the device knows what a step is trimmed to, so all is read there.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    slots,  # [R]
    query_start_loc,  # [R + 1]
    cu_num_logits,  # [R + 1]
    positions,  # [T]
    sizes,  # [S]
    prefill_lens,  # [S], or None
    depths,  # [S, N]; None: nodes are consecutive tokens
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    num_logits = tl.load(cu_num_logits + request + 1) - tl.load(cu_num_logits + request)
    root = tl.load(query_start_loc + request + 1) - num_logits
    size = tl.load(sizes + slot)
    if (size == 0) | (num_logits <= 1):
        return
    start = tl.load(positions + root)
    node = tl.arange(0, PADDED_N)
    is_row = node < tl.minimum(size, num_logits - 1)
    depth = 1 + node
    if depths is not None:
        if start < tl.load(prefill_lens + slot):  # its drafts are vLLM's placeholders
            tl.store(sizes + slot, 0)
            return
        depth = tl.load(depths + slot * N + node, mask=is_row, other=0)
    tl.store(positions + root + 1 + node, start + depth, mask=is_row)


def place_nodes(trees: TreeSlots, batch: InputBatch, prefill_lens: torch.Tensor | None) -> None:
    """Write the nodes' positions into a batch: the bonus token's position plus their depths. Their
    K/V slots stay those of consecutive tokens.

    Args:
        trees: trees by slot; cleared for requests that turn out to have placeholders.
        batch: vLLM's batch. Only its device tensors are read: the host may not know the trimming.
        prefill_lens: prefill length of each slot, [S]; None: write consecutive positions, once
            accepted nodes have been moved to the first rows.
    """
    num_nodes = trees.num_nodes
    _place[(batch.num_reqs,)](
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        batch.positions,
        trees.sizes,
        prefill_lens,
        None if prefill_lens is None else trees.depths,
        N=num_nodes,
        PADDED_N=next_power_of_2(num_nodes),
        num_warps=1,
    )
