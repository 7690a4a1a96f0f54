"""Which rows of a draft tree go where: pure functions, without vLLM or torch.

A request with a tree has a row for its bonus token and one for each of its n nodes, parents first;
the scheduler gives them slots one after the other, as to a chain. Attention can read one path at a
time from those slots: whatever stands in the first ones is what a row sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dflash.engine.block_layout import Ints


@dataclass(frozen=True)
class Path:
    """A way from the bonus token to a leaf."""

    nodes: list[int]
    """From the bonus token's child on."""
    num_new: int
    """Of these, how many last ones no path before has had."""


def chain_length(parents: Ints) -> int:
    """How many first nodes stand one behind the other, each behind the one before it."""
    differs = np.flatnonzero(parents != np.arange(-1, len(parents) - 1))
    return int(differs[0]) if len(differs) else len(parents)


def depths(parents: Ints) -> Ints:
    """Tokens between the start of the context's bonus token and each node, from 1, [n]."""
    found = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents.tolist()):
        found[node] = 1 + (found[parent] if parent >= 0 else 0)
    return found


def ancestors(parents: Ints) -> npt.NDArray[np.uint64]:
    """Nodes on the way to each node, itself among them: bit i is node i of up to 64, [n]."""
    found = np.zeros(len(parents), np.uint64)
    for node, parent in enumerate(parents.tolist()):
        above = found[parent] if parent >= 0 else np.uint64(0)
        found[node] = above | np.uint64(1 << node)
    return found


def other_paths(parents: Ints) -> list[Path]:
    """Paths to all leaves that the first chain does not reach.

    Rows of the first chain need no care: in the order of their slots they stand as in plain
    decoding. Each other node is new in exactly one path.
    """
    seen = set(range(chain_length(parents)))
    is_leaf = np.ones(len(parents), bool)
    is_leaf[parents[parents >= 0]] = False
    paths = []
    for leaf in np.flatnonzero(is_leaf).tolist():
        nodes = [leaf]
        while parents[nodes[-1]] >= 0:
            nodes.append(int(parents[nodes[-1]]))
        nodes.reverse()
        num_new = len(set(nodes) - seen)
        if num_new:
            paths.append(Path(nodes, num_new))
            seen.update(nodes)
    return paths


@dataclass(frozen=True)
class PathRows:
    """Rows of one path of each of P requests, as one batch of attention."""

    requests: Ints
    """[P]."""
    query_rows: Ints
    """Rows of the batch that ask: the new nodes, request by request, [Q]."""
    query_start_loc: Ints
    """[P + 1]."""
    seq_lens: Ints
    """Context, bonus token and path, [P]."""
    written_rows: Ints
    """Rows of the batch whose K/V the path is, [W]."""
    slot_rows: Ints
    """Rows of the batch in whose slots those go, [W]."""


def path_rows(paths: dict[int, list[Path]], starts: Ints, context_lens: Ints) -> list[PathRows]:
    """Attention in turns: one path of every request at a time.

    Args:
        paths: `other_paths` of requests of the batch.
        starts: row of each request's bonus token, [R].
        context_lens: tokens before it, [R].
    """
    turns = []
    for turn in range(max(map(len, paths.values()), default=0)):
        requests, seq_lens, counts = [], [], []
        query: list[int] = []
        written: list[int] = []
        slots: list[int] = []
        for request, of_request in paths.items():
            if turn >= len(of_request):
                continue
            path, start = of_request[turn], int(starts[request])
            rows = [start + 1 + node for node in path.nodes]
            requests.append(request)
            seq_lens.append(int(context_lens[request]) + 1 + len(rows))
            counts.append(path.num_new)
            query += rows[-path.num_new :]
            written += rows
            slots += range(start + 1, start + 1 + len(rows))
        turns.append(
            PathRows(
                np.array(requests),
                np.array(query),
                np.cumsum([0, *counts], dtype=np.int32),
                np.array(seq_lens, np.int32),
                np.array(written),
                np.array(slots),
            )
        )
    return turns
