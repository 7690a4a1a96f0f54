"""Where rows of trees go: by an oracle that computes which rows each row sees."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.v1 import tree_layout
from vllm_dflash.engine.v1.tree_layout import chain_length, depths, other_paths, path_rows

trees = st.lists(st.integers(-1, 6), min_size=1, max_size=9).map(
    lambda wanted: np.array([min(parent, node - 1) for node, parent in enumerate(wanted)])
)


def ancestors(parents: np.ndarray, node: int) -> list[int]:
    """From the bonus token's child down to the node itself."""
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, int(parents[found[0]]))
    return found


@given(trees)
def test_depth_is_how_many_nodes_lead_there(parents: np.ndarray) -> None:
    assert depths(parents).tolist() == [len(ancestors(parents, n)) for n in range(len(parents))]


@given(trees)
def test_a_word_says_which_nodes_a_row_sees(parents: np.ndarray) -> None:
    seen = [sum(1 << each for each in ancestors(parents, node)) for node in range(len(parents))]
    assert tree_layout.ancestors(parents).tolist() == seen


@given(trees)
def test_the_first_chain_is_as_long_as_nodes_stand_one_behind_the_other(
    parents: np.ndarray,
) -> None:
    length = chain_length(parents)
    assert parents[:length].tolist() == list(range(-1, length - 1))
    assert length == len(parents) or parents[length] != length - 1


@given(st.dictionaries(st.integers(0, 3), trees), st.lists(st.integers(0, 9), min_size=4))
def test_every_row_sees_its_context_and_its_ancestors(
    forest: dict[int, np.ndarray], lens: list[int]
) -> None:
    """Runs the turns on slots that hold names of rows, as attention would read them."""
    widths = [1 + len(forest.get(request, ())) for request in range(4)]
    starts, context_lens = np.cumsum([0, *widths[:-1]]), np.array(lens[:4])
    paths = {request: other_paths(parents) for request, parents in forest.items()}
    slots = np.arange(sum(widths))  # the row whose K/V each row's slot holds
    seen = {}  # of each row, the rows behind its request's context that it sees, itself last
    for request, width in enumerate(widths):
        for row in range(starts[request], starts[request] + width):
            seen[row] = slots[starts[request] : row + 1].tolist()
    asked = []
    for turn in path_rows(paths, starts, context_lens):
        slots[turn.slot_rows] = turn.written_rows
        for number, request in enumerate(turn.requests):
            start, length = starts[request], turn.seq_lens[number] - context_lens[request]
            rows = turn.query_rows[turn.query_start_loc[number] : turn.query_start_loc[number + 1]]
            for place, row in enumerate(rows, start=length - len(rows)):
                seen[row] = slots[start : start + place + 1].tolist()
                asked.append(row)
    assert len(asked) == len(set(asked))
    for request, parents in forest.items():
        start = starts[request]
        assert seen[start] == [start]
        for node in range(len(parents)):
            way = [start + 1 + one for one in ancestors(parents, node)]
            assert seen[start + 1 + node] == [start, *way]


def test_a_chain_takes_no_turn_of_its_own() -> None:
    parents = np.arange(-1, 6)
    assert path_rows({0: other_paths(parents)}, np.array([0]), np.array([5])) == []
