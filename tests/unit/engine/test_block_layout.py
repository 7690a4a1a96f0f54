"""Row layout against naive element-wise oracles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.block_layout import (
    block_inputs,
    bonus_tokens,
    draft_limits,
    kept_rows,
    split_drafts,
)

CACHE_BLOCK = 4
MASK = 999


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    return counts, [draw(st.integers(0, count - 1)) for count in counts]


@given(scheduled())
def test_kept_rows_are_all_but_each_tail(batch: tuple[list[int], list[int]]) -> None:
    counts, rejected = batch
    expected: list[int] = []
    first = 0
    for count, tail in zip(counts, rejected, strict=True):
        expected += range(first, first + count - tail)
        first += count
    rows = kept_rows(np.cumsum([0, *counts]), np.array(rejected))
    assert rows.tolist() == expected


requests = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 80), st.booleans()), min_size=1, max_size=6
)


@given(requests, st.integers(0, 7))
def test_draft_limits_look_at_one_request_each(
    batch: list[tuple[int, int, bool]], wanted: int
) -> None:
    contexts, limits, may = (np.array(column) for column in zip(*batch, strict=True))
    lengths = draft_limits(contexts, limits, wanted, may)
    for (context, limit, may_draft), length in zip(batch, lengths.tolist(), strict=True):
        # Context, bonus token, drafts and the token behind them must fit.
        fits = [k for k in range(wanted + 1) if k == 0 or context + 1 + k + 1 <= limit]
        assert length == (max(fits) if may_draft else 0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), min_size=1, max_size=6))
def test_block_inputs_against_a_loop_over_tokens(batch: list[tuple[int, int]]) -> None:
    contexts, lengths = (np.array(column) for column in zip(*batch, strict=True))
    bonus = np.arange(len(batch)) + 10
    table = np.random.default_rng(0).permutation(len(batch) * 16).reshape(len(batch), 16)
    got = block_inputs(contexts, lengths, bonus, MASK, table, CACHE_BLOCK)
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    mask_rows: list[int] = []
    seq_lens: list[int] = []
    drafted: list[int] = []
    starts = [0]
    for row, (context, length) in enumerate(batch):
        if length == 0:
            continue
        drafted.append(row)
        for offset in range(1 + length):
            position = context + offset
            if offset:
                mask_rows.append(len(ids))
            ids.append(MASK if offset else bonus[row])
            positions.append(position)
            slots.append(table[row, position // CACHE_BLOCK] * CACHE_BLOCK + position % CACHE_BLOCK)
        starts.append(len(ids))
        seq_lens.append(context + 1 + length)
    assert got.requests.tolist() == drafted
    assert got.input_ids.tolist() == ids
    assert got.positions.tolist() == positions
    assert got.slots.tolist() == slots
    assert got.query_start_loc.tolist() == starts
    assert got.seq_lens.tolist() == seq_lens
    assert got.mask_rows.tolist() == mask_rows


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6))
def test_bonus_token_is_the_last_valid_one(batch: list[tuple[int, bool]]) -> None:
    vocab_size, width = 50, 6
    sampled = np.full((len(batch), width), -1, dtype=np.int32)
    for row, (accepted, _) in enumerate(batch):
        sampled[row, : accepted + 1] = np.arange(accepted + 1) + 10 * row % vocab_size
    sampled[0, 1:] = vocab_size  # beyond the vocabulary: no tokens
    discarded = np.array([is_discarded for _, is_discarded in batch])
    bonus, counts = bonus_tokens(sampled, discarded, vocab_size)
    for row, (accepted, is_discarded) in enumerate(batch):
        produced = 0 if is_discarded else 1 if row == 0 else accepted + 1
        assert counts[row] == produced
        if produced:
            assert bonus[row] == sampled[row, produced - 1]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=7), max_size=5))
def test_drafts_end_before_the_first_that_is_not_finite(finite: list[list[bool]]) -> None:
    flat = [ok for request in finite for ok in request]
    lengths = np.array([len(request) for request in finite], dtype=int)
    drafts = split_drafts(range(len(flat)), np.array(flat, dtype=bool), lengths)
    first = 0
    for request, got in zip(finite, drafts, strict=True):
        expected = []
        for offset, ok in enumerate(request):
            if not ok:
                break
            expected.append(first + offset)
        assert got == expected
        first += len(request)
