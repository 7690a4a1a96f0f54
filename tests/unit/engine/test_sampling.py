"""The fixed sampler function against a naive oracle."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.v1.v1_fixes.expanded_sampling import expand_batch_to_tokens

values = st.sampled_from([-1.0, 0.5, 1.0, 2.0])


@given(st.lists(st.tuples(values, st.integers(0, 5)), min_size=1, max_size=6))
def test_each_draft_token_gets_its_requests_value(batch: list[tuple[float, int]]) -> None:
    x = torch.tensor([value for value, _ in batch])
    totals = torch.tensor([count for _, count in batch]).cumsum(0).int()
    expected = [7.0 if v == -1.0 else v for v, count in batch for _ in range(count)]
    got = expand_batch_to_tokens(x, totals, len(expected), replace_from=-1, replace_to=7)
    assert got.tolist() == expected
    assert got.dtype == x.dtype


def test_nothing_is_replaced_unless_asked() -> None:
    x = torch.tensor([0, 3], dtype=torch.int32)
    assert expand_batch_to_tokens(x, torch.tensor([1, 3]), 3).tolist() == [0, 3, 3]
