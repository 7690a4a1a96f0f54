"""The kernel for draft trees against attention written out, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from support import importing_support
from vllm_dflash.engine.tree_layout import ancestors, depths
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


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "case",
    [
        Case([37], [8]),
        Case([0, 50, 16], [5, 1, 12], heads=4, kv_heads=4),
        Case([100, 3], [64, 2], heads=2, kv_heads=1),
        Case([70, 20], [9, 6], window=24),
        Case([40], [20], window=3),
        Case([33, 12], [7, 7], softcap=15.0, head_size=48),
        Case([20, 45], [4, 15], sinks=True, head_size=16),
        Case([30, 31, 32], [6, 0, 3], heads=8, kv_heads=2, window=17, sinks=True),
    ],
    ids=lambda case: f"{case.contexts}-{case.trees}",
)
def test_rows_see_the_context_and_their_ancestors(case: Case, seed: int, everybody: bool) -> None:
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
    query = torch.randn(starts[-1] + 2, case.heads, case.head_size)
    scores = Scores(0.3, case.window, case.softcap, torch.randn(case.heads) if case.sinks else None)
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
        k, v = torch.randn(2, len(slots), case.kv_heads, case.head_size)
        keys[at], values[at] = k, v
        if case.window:  # blocks that left it are somebody else's: vLLM puts its null block there
            table[number, : max(context - case.window + 1, 0) // BLOCK_SIZE] = 0
        rows = slice(starts[number], starts[number + 1])
        bits[rows] = [0, *ancestors(tree)]
        depth[rows] = [0, *depths(tree)]
        if everybody or branches[number]:
            seen = visible(context, tree, case.window)
            expected[rows] = oracle(query[rows], k, v, seen, scores)
    output = torch.full_like(query, UNTOUCHED)
    attend_to_ancestors(
        query,
        keys,
        values,
        output,
        torch.from_numpy(table),
        torch.from_numpy(starts.astype(np.int32)),
        torch.tensor(seq_lens, dtype=torch.int32),
        TreeRows(
            torch.from_numpy(bits.view(np.int64)),
            torch.from_numpy(depth),
            torch.from_numpy(branches if not everybody else np.zeros_like(branches)),
        ),
        scores,
        most_rows=65,
        everybody=everybody,
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_it_compiles_for_gpus() -> None:
    """Without one: Triton brings the compilers."""
    child = subprocess.run(
        [sys.executable, "-m", "support.compile_child"],
        env={**os.environ, **importing_support(), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    assert child.stdout.count("True") == 6
