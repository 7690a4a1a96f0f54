"""Rows for requests, against what callers rely on."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.planning.learning import DraftLearner

MAX_REQUESTS = 2
batches = st.lists(st.lists(st.sampled_from("abcdefg"), unique=True, max_size=2 * MAX_REQUESTS))


@given(batches)
def test_every_request_has_a_row_of_its_own_while_it_is_known(batches: list[list[str]]) -> None:
    """And what a row held of an earlier request is gone."""
    learner, num_rows = DraftLearner(1, MAX_REQUESTS, 1), 2 * MAX_REQUESTS
    known: dict[str, int] = {}
    for batch in batches:
        new = [name for name in batch if name not in known]
        if len(known) + len(new) > num_rows:  # requests that are not in the batch are forgotten
            known = {name: row for name, row in known.items() if name in batch}
        rows = learner.rows(batch)
        assert rows.dtype == np.int64
        is_new = [name not in known for name in batch]
        for name, row in zip(batch, rows.tolist(), strict=True):
            assert known.setdefault(name, row) == row
        for held in (learner.blocks.num_observed, learner.texts.num_observed, learner._handed):
            assert (held[rows] == 0).tolist() == is_new
            held[rows] = 1
        assert len(set(known.values())) == len(known)
        assert set(known.values()) <= set(range(num_rows))
