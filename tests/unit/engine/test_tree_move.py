"""The kernels that move accepted nodes of draft trees, against loops; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.moved_nodes import Case, Layer, compare

pytestmark = pytest.mark.v2
PATHS = st.sets(st.integers(0, 8) | st.integers(0, 63), max_size=12).map(sorted)
LAYERS = st.builds(
    Layer,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([16, 64, 80]),
    st.sampled_from([16, 32]),
    st.booleans(),
)
CASES = st.builds(
    Case,
    st.lists(st.tuples(st.integers(0, 60), PATHS), min_size=1, max_size=3),
    st.lists(LAYERS, min_size=1, max_size=3),
    st.sampled_from([8, 66, 2_100]),
)


@settings(max_examples=40)
@given(CASES, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 3))
@example(Case([(15, [1, 2, 3]), (0, []), (31, [0, 1, 5])], [Layer(2, 16)]), torch.float32, 0)
@example(Case([(5, [*range(1, 64)])], [Layer(1, 64, 16), Layer(3, 16, 32)]), torch.bfloat16, 0)
@example(Case([(5, [1]), (8, [0, 2])], [Layer(1, 16)], without_blocks=0), torch.float32, 0)
def test_accepted_nodes_become_consecutive(case: Case, dtype: torch.dtype, seed: int) -> None:
    found, expected = compare(case, device="cpu", dtype=dtype, seed=seed)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
