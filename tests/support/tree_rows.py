"""Batches with draft trees for the tree attention kernels, beside attention written out."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.trees.tree_context import attend_to_context
from vllm_dflash.engine.v2.trees.tree_kernels import Scores
from vllm_dflash.engine.v2.trees.tree_nodes import attend_to_nodes
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots

BLOCK_SIZE = 16
UNTOUCHED = 7.0


class Request(NamedTuple):
    """Tokens before the bonus token, rows after it, and whether these are a tree."""

    context: int
    nodes: int
    has_tree: bool = True


@dataclass
class Case:
    """A batch, and a layer."""

    requests: list[Request]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    segments: int | None = None
    all_requests: bool = True
    most_nodes: int = 64


@dataclass
class Batch:
    """vLLM's metadata of a batch, as far as they are read."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    max_num_splits: int = 0


def random_tree(count: int, random: np.random.Generator) -> list[int]:
    """Return the parents of `count` nodes, some chains, some siblings."""
    return [int(random.integers(max(-1, node - 4), node)) for node in range(count)]


def ways(parents: list[int]) -> list[set[int]]:
    """Return what each node sees: the nodes on the way to it, and itself."""
    found: list[set[int]] = []
    for node, parent in enumerate(parents):
        found.append({node, *(found[parent] if parent >= 0 else ())})
    return found


def mask_of(way: set[int]) -> int:
    """Return a way as a signed word of 64 bits."""
    return int(np.array(sum(1 << node for node in way), np.uint64).view(np.int64))


def visible(context: int, parents: list[int], window: int) -> torch.Tensor:
    """Return what each row sees of context, bonus token and nodes, [1 + n, context + 1 + n]."""
    seen = ways(parents)
    positions = torch.tensor([*range(context + 1), *(context + len(way) for way in seen)])
    found = torch.zeros(1 + len(seen), len(positions), dtype=torch.bool)
    found[:, : context + 1] = True
    for row, way in enumerate(seen, 1):
        found[row, [context + 1 + node for node in way]] = True
    if window:
        found &= positions[context:, None] - positions < window
    return found


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of rows [T, H, D] to keys [S, K/V heads, D], where `seen` [T, S], and the
    logarithms of the sums of weights, without sinks, [H, T]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    weights = torch.einsum("thd,shd->hts", query, keys) * scores.scale
    if scores.softcap:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    weights = weights.masked_fill(~seen, -torch.inf)
    log_sums = weights.logsumexp(dim=-1)
    if scores.sinks is not None:
        sinks = scores.sinks[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([weights, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = weights.softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values), log_sums


@dataclass
class Made:
    """A case with random numbers, and the rows that are expected, in float32."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: Batch
    trees: TreeSlots
    scores: Scores
    expected: torch.Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Made:
        """Return the same on a device, with numbers of this dtype."""

        def moved(whole: Any) -> Any:
            found = copy(whole)
            for name, each in vars(whole).items():
                if isinstance(each, torch.Tensor):
                    setattr(found, name, each.to(device))
            return found

        sinks = self.scores.sinks
        return Made(
            self.query.to(device, dtype),
            self.kv_cache.to(device, dtype),
            moved(self.batch),
            moved(self.trees),
            replace(self.scores, sinks=None if sinks is None else sinks.to(device)),
            self.expected,
        )


def make(case: Case, seed: int = 0, dtype: torch.dtype = torch.float32) -> Made:
    """Make a batch. After it come two more requests and two more rows, which are none. Cache that
    was not written is NaN."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    requests = case.requests
    starts = np.cumsum([0, *(1 + each.nodes for each in requests)])
    seq_lens = [each.context + 1 + each.nodes for each in requests]
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    blocks = random.permutation(np.arange(1, sum(needed) + 3))
    shape = len(blocks) + 1, case.kv_heads, BLOCK_SIZE, 2 * case.head_size
    cache = torch.full(shape, torch.nan)
    table = np.zeros((len(requests) + 2, max(needed) + 1), np.int32)
    # Both sides compute with numbers that the kernel's dtype can represent.
    query = torch.randn(int(starts[-1]) + 2, case.heads, case.head_size).to(dtype).float()
    sinks = torch.randn(case.heads) if case.sinks else None
    scores = Scores(0.3, case.window, case.softcap, sinks)
    expected = torch.full_like(query, UNTOUCHED)

    slots = random.permutation(2 * len(requests) + 2)[: len(requests)]
    trees = TreeSlots(2 * len(requests) + 2, 1, case.most_nodes, torch.device("cpu"))
    trees.masks.fill_(-1)
    trees.sizes.fill_(3)  # of other slots
    trees.slots.fill_(-(10**9))  # after the batch's requests
    trees.slots[: len(requests)] = torch.from_numpy(slots)
    taken = 0
    for number, (request, slot) in enumerate(zip(requests, slots.tolist(), strict=True)):
        count = request.nodes
        parents = random_tree(count, random) if request.has_tree else list(range(-1, count - 1))
        trees.sizes[slot] = max(count, 1) if request.has_tree else 0
        if request.has_tree:
            trees.masks[slot, :count] = torch.tensor(list(map(mask_of, ways(parents))))
        own = blocks[taken : taken + needed[number]]
        taken += needed[number]
        table[number, : len(own)] = own
        places = np.arange(seq_lens[number])
        block, within = (torch.from_numpy(each) for each in divmod(places, BLOCK_SIZE))
        block = torch.from_numpy(own)[block]
        k, v = torch.randn(2, len(places), case.kv_heads, case.head_size).to(dtype).float()
        cache[block, :, within] = torch.cat([k, v], dim=-1)
        if case.window:  # blocks that left it belong to others: vLLM puts its null block there
            table[number, : max(request.context - case.window + 1, 0) // BLOCK_SIZE] = 0
        rows = slice(starts[number], starts[number + 1])
        if case.all_requests or request.has_tree:
            seen = visible(request.context, parents, case.window)
            expected[rows], _ = attention(query[rows], k, v, seen, scores)
    ends = np.array([*starts, starts[-1], starts[-1]], np.int32)
    batch = Batch(
        torch.from_numpy(ends),
        torch.tensor([*seq_lens, 0, 0], dtype=torch.int32),
        torch.from_numpy(table),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(1 + request.nodes for request in requests),
        max_seq_len=max(seq_lens),
    )
    return Made(query, cache, batch, trees, scores, expected)


def attend(
    case: Case,
    seed: int = 0,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch's rows as the kernels write them, and those expected, in float32."""
    made = make(case, seed, dtype).to(device, dtype)
    output = torch.full_like(made.query, UNTOUCHED)
    layer = made.batch, made.trees, made.scores
    context = attend_to_context(
        made.query, made.kv_cache, *layer, all_requests=case.all_requests, segments=case.segments
    )
    attend_to_nodes(
        made.query, made.kv_cache, context, output, *layer, all_requests=case.all_requests
    )
    return output.float().cpu(), made.expected


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ", window, sinks": {"window": 40, "sinks": True},
    ", softcap": {"softcap": 15.0},
}
ON_A_GPU = {
    f"head size {size}{name}": Case(
        [Request(64, 0), Request(3_000, 20), Request(3, 2), Request(500, 15, has_tree=False)],
        heads=8,
        head_size=size,
        **variant,
    )
    for size in (64, 128, 256, 512)
    for name, variant in VARIANTS.items()
}
ON_A_GPU["few rows"] = Case([Request(20, 3), Request(9, 2, has_tree=False)])
TREE_ATTENTION = Oracle("tree attention", ON_A_GPU, attend, interpreted=("few rows",))
