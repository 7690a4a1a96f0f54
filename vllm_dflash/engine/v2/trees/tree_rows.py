"""Where the rows of draft trees stand: nodes of one depth at one position, in slots of their own.

vLLM gives a request's rows consecutive positions, and K/V slots by these, which stay: attention
goes by the trees' masks. What a step is trimmed to only the device knows, so all is read there.
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
    depths,  # [S, N]; None: nodes stand in a row
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
        if start < tl.load(prefill_lens + slot):  # what it has are placeholders of vLLM's
            tl.store(sizes + slot, 0)
            return
        depth = tl.load(depths + slot * N + node, mask=is_row, other=0)
    tl.store(positions + root + 1 + node, start + depth, mask=is_row)


def place_nodes(
    trees: TreeSlots, batch: InputBatch, prefill_lens: torch.Tensor | None, *, by_depth: bool = True
) -> None:
    """Write the positions of nodes into a batch: behind the bonus token by their depths. Their K/V
    slots stay those of consecutive tokens.

    Args:
        trees: of the batch's requests; those that turn out to have placeholders get none.
        batch: vLLM's. What of it counts is on the device: the host may not know how it was trimmed.
        prefill_lens: of each slot, [S].
        by_depth: else they are consecutive tokens, and nobody asks for the lengths of prompts.
    """
    num_nodes = trees.num_nodes
    _place[(batch.num_reqs,)](
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        batch.positions,
        trees.sizes,
        prefill_lens,
        trees.depths if by_depth else None,
        N=num_nodes,
        PADDED_N=next_power_of_2(num_nodes),
        num_warps=1,
    )


def line_up(trees: TreeSlots, batch: InputBatch) -> None:
    """Accepted nodes have become consecutive tokens, in the first rows: so are the positions."""
    place_nodes(trees, batch, None, by_depth=False)
