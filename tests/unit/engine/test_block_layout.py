"""Row layout against naive element-wise oracles."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_dflash.engine.block_layout import (
    below_least,
    block_inputs,
    bonus_tokens,
    draft_limits,
    kept_rows,
    length_limits,
)

CACHE_BLOCK = 4
MASK = 999


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    counts = draw(st.lists(st.integers(1, 9), max_size=6))
    return counts, [draw(st.integers(0, count - 1)) for count in counts]


@given(scheduled())
def test_kept_rows_are_all_but_each_tail(batch: tuple[list[int], list[int]]) -> None:
    counts, rejected = batch
    expected: list[int] = []
    first = 0
    for count, tail in zip(counts, rejected, strict=True):
        expected += range(first, first + count - tail)
        first += count
    rows = kept_rows(np.cumsum([0, *counts]), np.array(rejected, dtype=int))
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


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), min_size=1, max_size=6),
    st.sampled_from((0, 1)),
)
def test_block_inputs_against_a_loop_over_tokens(batch: list[tuple[int, int]], first: int) -> None:
    """Their dtypes are those that attention kernels are given."""
    contexts, lengths = (np.array(column) for column in zip(*batch, strict=True))
    bonus = np.arange(len(batch)) + 10
    table = np.random.default_rng(0).permutation(len(batch) * 16).reshape(len(batch), 16)
    numbers = contexts.astype(np.int32), lengths, bonus, MASK, table.astype(np.int32)
    names = ["requests", "input_ids", "positions", "slots", "query_start_loc"]
    names += ["seq_lens", "offsets", "draft_lens", "predicting"]
    rows: dict[str, list[int]] = {name: [] for name in names}
    rows["query_start_loc"] = [0]
    for row, (context, length) in enumerate(batch):
        if length == 0:
            continue
        rows["requests"].append(row)
        rows["draft_lens"].append(length)
        for offset in range(first + length):
            position = context + offset
            block, inside = table[row, position // CACHE_BLOCK], position % CACHE_BLOCK
            if offset >= first:
                rows["predicting"].append(len(rows["offsets"]))
            rows["offsets"].append(offset)
            rows["input_ids"].append(MASK if offset else bonus[row])
            rows["positions"].append(position)
            rows["slots"].append(block * CACHE_BLOCK + inside)
        rows["query_start_loc"].append(len(rows["offsets"]))
        rows["seq_lens"].append(context + first + length)
    got = vars(block_inputs(*numbers, CACHE_BLOCK, first))
    assert {name: found.tolist() for name, found in got.items()} == rows
    short = {name for name, found in got.items() if found.dtype != np.int64}
    assert short == {"input_ids", "query_start_loc", "seq_lens"}
    assert {got[name].dtype for name in short} == {np.dtype(np.int32)}


@given(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), min_size=1, max_size=6))
def test_bonus_token_is_the_last_valid_one(batch: list[tuple[int, bool]]) -> None:
    """Batch: accepted drafts of each request (-1: not even the first token is one), and whether its
    tokens are discarded. In most steps of a busy engine, no request has drafts."""
    vocab_size, width = 50, max(1 + accepted for accepted, _ in batch) or 1
    sampled = np.full((len(batch), width), -1)
    for row, (accepted, _) in enumerate(batch):
        sampled[row, : accepted + 1] = (49 + np.arange(accepted + 1) + row) % vocab_size
    sampled[0, 1:] = vocab_size  # outside the vocabulary: not tokens
    discarded = np.array([is_discarded for _, is_discarded in batch])
    bonus, counts = bonus_tokens(sampled, discarded, vocab_size)
    assert bonus.shape == counts.shape == (len(batch),)
    assert counts.dtype == np.int32  # like vLLM's
    for row, (accepted, is_discarded) in enumerate(batch):
        valid = min(accepted + 1, 1 if row == 0 else width)
        produced = 0 if is_discarded else valid
        assert counts[row] == produced
        if produced:
            assert bonus[row] == sampled[row, produced - 1]


def test_slots_of_a_large_cache_do_not_overflow() -> None:
    """Block numbers come as int32, which is too small for slots from 2**31 on."""
    table = np.array([[2**30]], dtype=np.int32)
    got = block_inputs(np.array([1]), np.array([1]), np.array([7]), MASK, table, CACHE_BLOCK)
    assert got.slots.tolist() == [2**32 + 1, 2**32 + 2]


def test_a_request_ends_behind_its_prompt_and_what_it_asked_for() -> None:
    def request(max_tokens: int | None, min_tokens: int = 0) -> SimpleNamespace:
        params = SimpleNamespace(max_tokens=max_tokens, min_tokens=min_tokens)
        return SimpleNamespace(num_prompt_tokens=50, sampling_params=params)

    pooling = SimpleNamespace(num_prompt_tokens=50, sampling_params=None)
    requests = {"a": request(10), "b": request(10_000, 7), "waits": request(20), "c": request(None)}
    requests["d"] = pooling
    limits, least = length_limits(requests, ["c", "d", "a", "b"], 256)  # the batch's own order
    assert limits.tolist() == [256, 256, 60, 256]
    assert least.tolist() == [0, 0, 0, 57]


def test_drafts_alone_do_not_reach_the_least_length() -> None:
    """A request of `context + 1` tokens, whose least length is 50: once it is reached, all drafts
    may be verified."""
    context = np.array([20, 40, 47, 48, 49, 50])
    limits = below_least(np.full(6, 60), np.full(6, 50), context)
    assert draft_limits(context, limits, 7, np.ones(6, bool)).tolist() == [7, 7, 1, 0, 7, 7]
    assert below_least(np.array([44, 60]), np.array([50, 0]), context[:2]).tolist() == [44, 60]
