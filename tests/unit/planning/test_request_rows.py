"""Rows for requests, against what callers rely on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.step import RequestRows

NUM_ROWS = 4
batches = st.lists(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=NUM_ROWS))


@given(batches)
def test_every_request_has_a_row_of_its_own_while_it_is_known(batches: list[list[str]]) -> None:
    rows = RequestRows(NUM_ROWS)
    known: dict[str, int] = {}
    for batch in batches:
        new = [name for name in batch if name not in known]
        if len(known) + len(new) > NUM_ROWS:  # requests that are not in the batch are forgotten
            known = {name: row for name, row in known.items() if name in batch}
        given, fresh = rows.of(batch)
        assert given.dtype == fresh.dtype == np.int64
        for name, row in zip(batch, given.tolist(), strict=True):
            assert known.setdefault(name, row) == row
        assert [known[name] for name in new] == fresh.tolist()
        assert len(set(known.values())) == len(known)
        assert set(known.values()) <= set(range(NUM_ROWS))
