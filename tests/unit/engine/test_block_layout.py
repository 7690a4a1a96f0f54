"""Row layout against naive element-wise oracles."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.block_layout import (
    block_inputs,
    bonus_tokens,
    draft_limits,
    kept_rows,
    length_limits,
    tables_from,
)
from vllm_dflash.planning.window import Window

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
    assert rows.dtype == np.int64  # torch indexes with int64


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
        # Context, bonus token, drafts and the token after them must fit.
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
    sampled[0, 1:] = vocab_size  # outside the vocabulary: not tokens
    discarded = np.array([is_discarded for _, is_discarded in batch])
    bonus, counts = bonus_tokens(sampled, discarded, vocab_size)
    for row, (accepted, is_discarded) in enumerate(batch):
        produced = 0 if is_discarded else 1 if row == 0 else accepted + 1
        assert counts[row] == produced
        if produced:
            assert bonus[row] == sampled[row, produced - 1]


@pytest.mark.parametrize("width", [1, 4], ids=["nobody had drafts", "some had drafts"])
def test_a_step_without_drafts_has_one_column(width: int) -> None:
    """Most steps of a busy engine are like this. The result must be that of the general case."""
    vocab_size = 50
    newest = [5, -1, 0, 49, 50, 7, -1, 0]
    discarded = np.array([False] * 5 + [True] * 3)
    sampled = np.full((len(newest), width), -1)
    sampled[:, 0] = newest
    bonus, counts = bonus_tokens(sampled, discarded, vocab_size)
    assert counts.tolist() == [1, 0, 1, 1, 0, 0, 0, 0]
    assert bonus[counts > 0].tolist() == [5, 0, 49]
    assert bonus.shape == counts.shape == (8,)
    assert counts.dtype == np.int32  # like vLLM's


def test_what_attention_kernels_are_given_has_their_dtypes() -> None:
    got = block_inputs(
        np.array([5, 0, 6], dtype=np.int32),
        np.array([2, 0, 1]),
        np.array([11, 12, 13]),
        MASK,
        np.array([[3, 8], [4, 9], [5, 10]], dtype=np.int32),
        CACHE_BLOCK,
    )
    expected = {
        "requests": ([0, 2], np.int64),
        "input_ids": ([11, MASK, MASK, 13, MASK], np.int32),
        "positions": ([5, 6, 7, 6, 7], np.int64),
        "slots": ([33, 34, 35, 42, 43], np.int64),
        "query_start_loc": ([0, 3, 5], np.int32),
        "seq_lens": ([8, 8], np.int32),
        "first_blocks": ([0, 0], np.int32),
        "offsets": ([0, 1, 2, 0, 1], np.int64),
        "mask_rows": ([1, 2, 4], np.int64),
    }
    assert {name: (rows.tolist(), rows.dtype) for name, rows in vars(got).items()} == expected


def test_slots_of_a_large_cache_do_not_overflow() -> None:
    """Block numbers come as int32, which is too small for slots from 2**31 on."""
    table = np.array([[2**30]], dtype=np.int32)
    got = block_inputs(np.array([1]), np.array([1]), np.array([7]), MASK, table, CACHE_BLOCK)
    assert got.slots.tolist() == [2**32 + 1, 2**32 + 2]


def test_nobody_keeps_or_drafts_anything() -> None:
    kept = kept_rows(np.array([0]), np.array([], dtype=int))
    assert (kept.tolist(), kept.dtype) == ([], np.int64)
    nobody = np.zeros(2, dtype=int)
    got = block_inputs(np.array([4, 5]), nobody, nobody, MASK, np.zeros((2, 4), int), CACHE_BLOCK)
    assert got.query_start_loc.tolist() == [0]
    assert not any(len(rows) for name, rows in vars(got).items() if name != "query_start_loc")


def test_a_request_ends_behind_its_prompt_and_what_it_asked_for() -> None:
    def request(max_tokens: int | None) -> SimpleNamespace:
        params = SimpleNamespace(max_tokens=max_tokens)
        return SimpleNamespace(num_prompt_tokens=50, sampling_params=params)

    pooling = SimpleNamespace(num_prompt_tokens=50, sampling_params=None)
    requests = {"a": request(10), "b": request(10_000), "waits": request(20), "c": request(None)}
    requests["d"] = pooling
    limits = length_limits(requests, ["c", "d", "a", "b"], 256)  # the batch has its own order
    assert limits.tolist() == [256, 256, 60, 256]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 7)), min_size=1, max_size=5),
    st.integers(0, 20),
    st.integers(0, 30),
)
def test_a_window_leaves_out_whole_cache_blocks(
    batch: list[tuple[int, int]], tokens: int, shortest: int
) -> None:
    """Attention finds, at shifted places, the slots of the last tokens and of the block."""
    contexts, lengths = (np.array(column) for column in zip(*batch, strict=True))
    table = np.arange(len(batch) * 20).reshape(len(batch), 20)
    given = contexts, lengths, contexts, MASK, table, CACHE_BLOCK
    whole, window = block_inputs(*given), Window(tokens, shortest, 0)
    inputs = block_inputs(*given, window)
    shifted = tables_from(table, inputs.first_blocks)
    for request, (context, length) in enumerate(batch):
        skipped = int(window.skipped(contexts, CACHE_BLOCK)[request])
        end = context + 1 + length
        assert inputs.seq_lens[request] == end - skipped
        read = [
            shifted[request, place // CACHE_BLOCK] * CACHE_BLOCK + place % CACHE_BLOCK
            for place in range(end - skipped)
        ]
        all_slots = [
            table[request, place // CACHE_BLOCK] * CACHE_BLOCK + place % CACHE_BLOCK
            for place in range(end)
        ]
        assert read == all_slots[skipped:]
    # Rows keep their positions and slots.
    assert inputs.positions.tolist() == whole.positions.tolist()
    assert inputs.slots.tolist() == whole.slots.tolist()
