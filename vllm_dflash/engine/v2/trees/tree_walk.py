"""Draft trees are verified by sampling, with a walk on the device.

Behind the bonus token and behind each node a token is drawn, exactly as plain decoding draws one
there: by vLLM's function, from the target's logits, by the request's seed and the row's position.
Where a node's token is the one that was drawn behind its parent, it is accepted, and the walk goes
on with what was drawn behind it; the last token drawn on the way is the bonus token. So drafts
have no part in any draw, and what is written is what plain decoding writes, at any temperature:
they only say which rows are there when a token is known. Two nodes of one depth draw by the same
numbers, but only one of them is on the way, so no draw is used twice.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_dflash.config.mode import TREE_CUTS
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.vllm_fixes.scored_verification import ScoringVerifier


@triton.jit
def _walk(  # type: ignore[no-untyped-def]
    slots,  # [R]
    cu_num_logits,  # [R + 1]
    drawn,  # [logits]
    sizes,  # [S]
    tokens,  # [S, N]
    parents,  # [S, N]
    likeliest,  # [S]
    sampled,  # [R, 1 + W]
    num_sampled,  # [R]
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
    size = tl.minimum(tl.load(cu_num_logits + request + 1) - root - 1, tl.load(sizes + slot))
    if size <= 0:
        return
    each = tl.arange(0, PADDED_N)
    is_node = each < size
    token = tl.load(tokens + slot * N + each, mask=is_node, other=-1)
    parent = tl.load(parents + slot * N + each, mask=is_node, other=-2)
    firsts = tl.load(likeliest + slot)
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
    tl.store(path_lens + request, accepted)
    of_request = chains + request * (2 + CUTS)
    tl.store(of_request, num_firsts)
    tl.store(of_request + 1, of_firsts)
    # Nodes come behind their parents, so what is cut off a tree is cut off the end of a path.
    # `TREE_CUTS` are 7, 15, 31.
    for cut in tl.static_range(CUTS):
        inside = on_path & (each < (8 << cut) - 1)
        tl.store(of_request + 2 + cut, 1 + tl.sum(inside.to(tl.int32), axis=0))


def walk(
    trees: TreeSlots,
    slots: torch.Tensor,
    cu_num_logits: torch.Tensor,
    drawn: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    start: int = 0,
) -> None:
    """Follow what was drawn; requests without a tree are left as they are.

    Args:
        trees: in: of the slots; out: `paths`, `path_lens`, `chains`.
        slots: of R requests, [R].
        cu_num_logits: first row of each in `drawn`, [R + 1].
        drawn: behind each row, int64.
        sampled: out, tokens that each gets, [R, 1 + W].
        num_sampled: out, how many, [R].
        start: of the R requests in the batch.
    """
    num_nodes = trees.num_nodes
    _walk[(len(slots),)](
        slots,
        cu_num_logits,
        drawn,
        trees.sizes,
        trees.tokens,
        trees.parents,
        trees.likeliest,
        sampled,
        num_sampled,
        trees.paths[start:],
        trees.path_lens[start:],
        trees.chains[start:],
        sampled.stride(0),
        D=trees.paths.shape[1],
        N=num_nodes,
        PADDED_N=next_power_of_2(num_nodes),
        CUTS=len(TREE_CUTS),
        num_warps=1,
    )


class TreeVerifier(ScoringVerifier):
    """vLLM's for chains, and the walk for trees: which, the device knows."""

    trees: TreeSlots
    _start = 0
    """First of the requests that are verified next, in the batch."""

    def __call__(
        self, logits: torch.Tensor, input_batch: InputBatch, *others: Any, **more: Any
    ) -> SamplerOutput:
        """Logits of all rows that sample to tokens [R, 1 + W]; vLLM's arguments."""
        self._start = 0
        return super().__call__(logits, input_batch, *others, **more)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed, sampled, num_sampled = super()._verify(
            logits,
            draft_logits,
            draft_sampled,
            pos,
            cu_num_logits,
            idx_mapping,
            idx_mapping_np,
            expanded_idx_mapping,
            *others,
        )
        states = self.sampler.sampling_states
        drawn = gumbel_sample(
            processed,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,  # it is
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        walk(self.trees, idx_mapping, cu_num_logits, drawn, sampled, num_sampled, start=self._start)
        self._start += len(idx_mapping)
        return processed, sampled, num_sampled
