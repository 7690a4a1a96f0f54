"""Batches of draft trees for the kernel, beside attention written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v1.tree_layout import ancestors, depths
from vllm_dflash.engine.v2.tree_kernel import Scores, TreeRows, attend_to_ancestors

BLOCK_SIZE = 16
UNTOUCHED = 7.0


def random_tree(count: int, random: np.random.Generator) -> np.ndarray:
    """Parents of so many nodes, some chains, some siblings."""
    return np.array([int(random.integers(max(-1, node - 4), node)) for node in range(count)])


@dataclass
class Case:
    """A batch: context and number of nodes of each request."""

    contexts: list[int]
    trees: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False


def oracle(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Attention of rows [T, H, D] to keys [S, K/V heads, D], where `seen` [T, S]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    weights = torch.einsum("thd,shd->hts", query, keys) * scores.scale
    if scores.softcap:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    weights = weights.masked_fill(~seen, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([weights, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = weights.softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, values)


def visible(context: int, parents: np.ndarray, window: int) -> torch.Tensor:
    """Which of context, bonus token and nodes each of the rows sees, [1 + n, context + 1 + n]."""
    depth = [0, *depths(parents).tolist()]
    positions = [*range(context), *(context + each for each in depth)]
    found = torch.zeros(len(depth), len(positions), dtype=torch.bool)
    for row in range(len(depth)):
        way, node = {0}, row
        while node > 0:
            way.add(node)
            node = int(parents[node - 1]) + 1
        for key in range(len(positions)):
            is_seen = key < context or key - context in way
            found[row, key] = is_seen and (
                not window or context + depth[row] - positions[key] < window
            )
    return found


def attend(
    case: Case,
    seed: int = 0,
    *,
    everybody: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a batch as the kernel writes them, and as they should be, in float32."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    trees = [random_tree(count, random) for count in case.trees]
    num_rows = [1 + len(tree) for tree in trees]
    starts = np.cumsum([0, *num_rows])
    seq_lens = [context + rows for context, rows in zip(case.contexts, num_rows, strict=True)]
    needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
    blocks = random.permutation(np.arange(1, sum(needed) + 3))
    table = np.zeros((len(trees), max(needed)), np.int32)
    # Two heads side by side as in vLLM's cache; what nobody wrote is no number.
    cache = torch.full((len(blocks) + 1, case.kv_heads, BLOCK_SIZE, 2 * case.head_size), torch.nan)
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    # Both sides compute with numbers that the kernel's dtype can tell apart.
    query = torch.randn(starts[-1] + 2, case.heads, case.head_size).to(dtype).float()
    sinks = torch.randn(case.heads) if case.sinks else None
    scores = Scores(0.3, case.window, case.softcap, sinks)
    expected = torch.full_like(query, UNTOUCHED)
    branches, taken = np.ones(len(trees), np.int32), 0
    branches[0] = everybody  # flags are not looked at then
    bits, depth = np.zeros(len(query), np.uint64), np.zeros(len(query), np.int32)
    for number, (tree, context) in enumerate(zip(trees, case.contexts, strict=True)):
        own = blocks[taken : taken + needed[number]]
        taken += needed[number]
        table[number, : len(own)] = own
        slots = np.arange(seq_lens[number])
        at = torch.from_numpy(own[slots // BLOCK_SIZE]), torch.from_numpy(slots % BLOCK_SIZE)
        k, v = torch.randn(2, len(slots), case.kv_heads, case.head_size).to(dtype).float()
        keys[at], values[at] = k, v
        if case.window:  # blocks that left it are somebody else's: vLLM puts its null block there
            table[number, : max(context - case.window + 1, 0) // BLOCK_SIZE] = 0
        rows = slice(starts[number], starts[number + 1])
        bits[rows] = [0, *ancestors(tree)]
        depth[rows] = [0, *depths(tree)]
        if everybody or branches[number]:
            seen = visible(context, tree, case.window)
            expected[rows] = oracle(query[rows], k, v, seen, scores)
    keys, values = cache.to(device, dtype).transpose(1, 2).chunk(2, dim=-1)
    output = torch.full_like(query, UNTOUCHED, device=device, dtype=dtype)
    flags = np.zeros_like(branches) if everybody else branches
    attend_to_ancestors(
        query.to(device, dtype),
        keys,
        values,
        output,
        torch.from_numpy(table).to(device),
        torch.from_numpy(starts.astype(np.int32)).to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        TreeRows(
            *(torch.from_numpy(each).to(device) for each in (bits.view(np.int64), depth, flags))
        ),
        replace(scores, sinks=None if sinks is None else sinks.to(device)),
        most_rows=65,
        everybody=everybody,
    )
    return output.float().cpu(), expected


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ", window, sinks": {"window": 40, "sinks": True},
    ", softcap": {"softcap": 15.0},
}
ON_A_GPU = {
    f"head size {size}{name}": Case(
        [64, 200, 3], [0, 20, 2], heads=8, kv_heads=2, head_size=size, **variant
    )
    for size in (64, 128, 256, 512)
    for name, variant in VARIANTS.items()
}
TREE_ATTENTION = Oracle("tree attention", ON_A_GPU, attend)
