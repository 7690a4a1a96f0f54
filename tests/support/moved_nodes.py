"""Accepted nodes of draft trees, for the kernels that move their rows, beside loops."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.kernel_oracle import Oracle
from vllm_dflash.config.speculative_settings import MOST_NODES
from vllm_dflash.engine.v2.trees.tree_move import CachedLayer, CacheMover, move_rows
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots


@dataclass
class Layer:
    """A cache: K/V heads, head size, tokens of a block, whether tokens hold the heads."""

    heads: int
    head_size: int
    block_size: int = 16
    tokens_first: bool = False


@dataclass
class Case:
    """Requests of a batch: context, nodes, accepted nodes; layers, each of its own cache group."""

    requests: list[tuple[int, list[int]]]
    """Context, and accepted nodes by depth; up to 3 more nodes follow these."""
    layers: list[Layer]
    width: int = 96
    without_blocks: int | None = None
    """A request that has null blocks only."""


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches and the features afterwards, found and expected, one after another.

    One cache is listed twice, like that of layers that share it. After the batch there are two
    more rows, which are no requests.
    """
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    contexts = [context for context, _ in case.requests]
    paths = [path for _, path in case.requests]
    counts = [max(path, default=-1) + 1 + int(random.integers(0, 4)) for path in paths]
    starts = np.cumsum([0, *(1 + count for count in counts)])
    seq_lens = [context + 1 + count for context, count in zip(contexts, counts, strict=True)]
    most_nodes = min(max(*counts, 1), MOST_NODES)
    trees = TreeSlots(len(paths) + 4, most_nodes, most_nodes, torch.device(device))
    trees.paths.fill_(99_999)
    for request, path in enumerate(paths):
        trees.paths[request, : len(path)] = torch.tensor(path)
        trees.path_lens[request] = len(path)
    ends = torch.from_numpy(np.array([*starts, starts[-1], starts[-1]], np.int32)).to(device)
    lens = torch.tensor([*seq_lens, 0, 0], dtype=torch.int32, device=device)
    batch: Any = SimpleNamespace(query_start_loc=ends, seq_lens=lens)

    layers, expected = [], []
    for layer in case.layers:
        size = layer.block_size
        needed = [-(-length // size) for length in seq_lens]
        blocks = random.permutation(np.arange(1, sum(needed) + 1))
        table = np.zeros((len(trees.paths), max(needed) + 2), np.int32)
        for request, owned in enumerate(np.split(blocks, np.cumsum(needed)[:-1])):
            table[request, : len(owned)] = owned
            table[request, : max(contexts[request] - 8, 0) // size] = 0  # as before a window
        order = (size, layer.heads) if layer.tokens_first else (layer.heads, size)
        cache = torch.randn(len(blocks) + 1, *order, 2 * layer.head_size).to(device, dtype)
        if layer.tokens_first:
            cache = cache.transpose(1, 2)
        wanted = cache.clone()
        if case.without_blocks is not None:
            table[case.without_blocks] = 0
        for request, path in enumerate(paths):
            for depth, node in enumerate(path if request != case.without_blocks else ()):
                (goal, to), (source, at) = (
                    divmod(contexts[request] + 1 + place, size) for place in (depth, node)
                )
                goal, source = int(table[request, goal]), int(table[request, source])
                wanted[goal, :, to] = cache[source, :, at]
        expected.append(wanted.float().cpu())
        layers.append(CachedLayer("", cache, torch.from_numpy(table).to(device), size))
    CacheMover([*layers, layers[0]]).move(trees, batch)
    found = [layer.kv_cache.float().cpu() for layer in layers]

    rows = torch.randn(int(starts[-1]) + 2, case.width).to(device, dtype)
    wanted = rows.clone()
    for start, path in zip(starts.tolist(), paths, strict=False):
        wanted[start + 1 : start + 1 + len(path)] = rows[[start + 1 + node for node in path]]
    move_rows(rows, trees, ends)
    found.append(rows.float().cpu())
    expected.append(wanted.float().cpu())
    return (torch.cat([each.flatten() for each in whole]) for whole in (found, expected))  # type: ignore[return-value]


ON_A_GPU = {
    "few layers": Case([(40, [0, 2]), (7, [1])], [Layer(2, 16), Layer(1, 32)]),
    "many layers": Case(
        [(3_000, [1, 3, 8, 9, 30]), (40, [0, 1, 2]), (0, []), (17, [*range(1, 60, 2)])],
        [Layer(8, 128), Layer(1, 512, block_size=64), Layer(4, 80, tokens_first=True)] * 8,
        width=20_480,
    ),
}
TREE_MOVE = Oracle(
    "tree move",
    ON_A_GPU,
    compare,
    limits={torch.float32: 0.0, torch.bfloat16: 0.0},
    interpreted=("few layers",),
)
