"""Verifies draft trees, with a walk on the device along the tokens that were drawn (`drawing.py`).

A token is drawn after the bonus token and after each node. A node is accepted if its token is the
one drawn after its parent, and the walk goes on with the token drawn after the node. The last token
drawn on the path is the bonus token. So drafts do not affect any draw, and the output is what plain
decoding writes: drafts only determine which rows have been computed when a token is known. Two
nodes of equal depth draw with the same random numbers, but only one of them can be on the path, so
no draw is used twice.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dflash.config.engine_options import TREE_CUTS
from vllm_dflash.engine.v2.drawing import DrawingVerifier
from vllm_dflash.engine.v2.drawing_kernels import Verified
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots


@triton.jit(do_not_specialize_on_alignment=["slots", "paths", "path_lens", "chains"])
def _walk(  # type: ignore[no-untyped-def]
    slots,  # [R]
    cu_num_logits,  # [R + 1]
    drawn,  # [logits]
    sizes,  # [S]
    tokens,  # [S, N]
    parents,  # [S, N]
    argmax_nodes,  # [S]
    sampled,  # [R, 1 + W]
    num_sampled,  # [R]
    num_rejected,  # [R]
    paths,  # [R, D]
    path_lens,  # [R]
    chains,  # [R, 2 + CUTS]
    stride_sampled,
    D: tl.constexpr,
    N: tl.constexpr,
    PADDED_N: tl.constexpr,
    CUTS: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    root = tl.load(cu_num_logits + request)
    num_rows = tl.load(cu_num_logits + request + 1) - root
    size = tl.minimum(num_rows - 1, tl.load(sizes + slot))
    if size <= 0:
        return
    each = tl.arange(0, PADDED_N)
    is_node = each < size
    token = tl.load(tokens + slot * N + each, mask=is_node, other=-1)
    parent = tl.load(parents + slot * N + each, mask=is_node, other=-2)
    firsts = tl.load(argmax_nodes + slot)
    num_firsts = tl.sum(((firsts >> each.to(tl.int64)) & 1).to(tl.int32) * is_node.to(tl.int32))

    accepted = tl.full([], 0, tl.int32)
    of_firsts = tl.full([], 0, tl.int32)
    on_path = each < 0
    node = tl.full([], -1, tl.int32)
    goes_on = size > 0
    while goes_on:
        wrote = tl.load(drawn + root + 1 + node)
        tl.store(sampled + request * stride_sampled + accepted, wrote)
        is_next = is_node & (parent == node) & (token == wrote)
        node = tl.min(tl.where(is_next, each, PADDED_N), axis=0)
        goes_on = node < PADDED_N
        if goes_on:
            tl.store(paths + request * D + accepted, node)
            is_first = ((firsts >> node.to(tl.int64)) & 1) != 0
            of_firsts += ((of_firsts == accepted) & is_first).to(tl.int32)
            on_path = on_path | (each == node)
            accepted += 1
    tl.store(num_sampled + request, accepted + 1)
    tl.store(num_rejected + request, num_rows - (accepted + 1))
    tl.store(path_lens + request, accepted)
    of_request = chains + request * (2 + CUTS)
    tl.store(of_request, num_firsts)
    tl.store(of_request + 1, of_firsts)
    # Nodes come after their parents, so cutting a tree cuts a path at its end.
    # `TREE_CUTS` are 7, 15, 31.
    for cut in tl.static_range(CUTS):
        inside = on_path & (each < (8 << cut) - 1)
        tl.store(of_request + 2 + cut, 1 + tl.sum(inside.to(tl.int32), axis=0))


def walk(
    trees: TreeSlots,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
    verified: Verified,
    start: int = 0,
) -> None:
    """Walk along the drawn tokens; results of requests without a tree are not changed.

    Args:
        trees: in: trees by slot; out: `paths`, `path_lens`, `chains`.
        slots: slots of R requests, [R].
        cu_num_logits: first row of each request in `drawn`, and the total, [R + 1].
        verified: in: token drawn after each row; out: tokens of each request.
        start: index of the first of the R requests in the batch.
    """
    num_nodes = trees.num_nodes
    _walk[(len(slots),)](
        slots,
        cu_num_logits,
        verified.drawn,
        trees.sizes,
        trees.tokens,
        trees.parents,
        trees.argmax_nodes,
        verified.sampled,
        verified.num_sampled,
        verified.num_rejected,
        trees.paths[start:],
        trees.path_lens[start:],
        trees.chains[start:],
        verified.sampled.stride(0),
        D=trees.paths.shape[1],
        N=num_nodes,
        PADDED_N=next_power_of_2(num_nodes),
        CUTS=len(TREE_CUTS),
        num_warps=1,
    )


class TreeVerifier(DrawingVerifier):
    """Accepts chains, and walks along trees; only the device knows which is which."""

    trees: TreeSlots
    _start = 0
    """Index in the batch of the first request that is verified next."""

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *others: Any, **more: Any
    ) -> SamplerOutput:
        """Verify the logits of all rows that sample: tokens [R, 1 + W]; vLLM's arguments."""
        self._start = 0
        return super().__call__(logits, input_batch, *others, **more)

    def verify(self, *batch: torch.Tensor, **where: Any) -> Verified:
        """Draw a token after each row, and accept drafts; arguments as of `draw_and_accept`."""
        found = super().verify(*batch, **where)
        *_, ends, slots = batch
        walk(self.trees, slots, ends, found, self._start)
        self._start += len(slots)
        return found
