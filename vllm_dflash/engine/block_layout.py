"""Row layout of a batch: pure, vectorised functions, without vLLM or torch.

R: requests in the batch. D: drafted requests. Q: rows of their blocks, the sum of 1 + k (of k if
the bonus token's row predicts the first draft).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.planning import Bools, Ints


def bonus_tokens(sampled: Ints, discarded: Bools, vocab_size: int) -> tuple[Ints, Ints]:
    """Each request's newest token, and how many tokens it got in this step.

    Args:
        sampled: accepted drafts and the token after them, then -1, [R, 1 + K].
        discarded: requests still in their prompt, whose sample does not count, [R].
        vocab_size: ids from here on are not tokens either.

    Returns:
        Token ids (meaningless if the count is 0) and counts, [R] each.
    """
    valid = (sampled >= 0) & (sampled < vocab_size)
    counts = valid.sum(axis=1, dtype=np.int32) * ~discarded
    return sampled[np.arange(len(sampled)), counts - 1], counts


def kept_rows(query_start_loc: Ints, num_rejected: Ints) -> Ints:
    """Rows of the target's batch that become context: all except rejected drafts.

    Args:
        query_start_loc: first row of each request, then the total, [R + 1].
        num_rejected: drafts that the target rejected, the last rows of each request, [R].

    Returns:
        Row numbers, ascending, [C] int64.
    """
    starts = query_start_loc[:-1].astype(np.int64)
    kept = np.diff(query_start_loc) - num_rejected
    ends = np.cumsum(kept)
    return np.repeat(starts - (ends - kept), kept) + np.arange(ends[-1] if len(ends) else 0)


def length_limits(requests: Mapping[str, Any], ids: Sequence[str], most: int) -> tuple[Ints, Ints]:
    """Maximum length of each request in tokens: its own limit or the context limit, [R]; and the
    length at which it has its `min_tokens`, 0 if it sets none, [R].

    Args:
        requests: vLLM's `CachedRequestState` by id; may contain other requests.
        ids: ids of the R requests.
        most: the context limit.
    """
    limits = np.full(len(ids), most, dtype=np.int64)
    least = np.zeros_like(limits)
    for row, name in enumerate(ids):
        prompt, params = requests[name].num_prompt_tokens, requests[name].sampling_params
        if params is None:
            continue
        if params.max_tokens:
            limits[row] = min(most, prompt + params.max_tokens)
        if params.min_tokens:
            least[row] = prompt + params.min_tokens
    return limits, least


def below_least(length_limits: Ints, least: Ints, context_lens: Ints) -> Ints:
    """Length limits with which no request's drafts alone reach its `min_tokens`, [R].

    Wrong in vLLM 0.32.0 and 0.33.0, V1 runner: the row after the drafts has stop tokens masked if
    `min_tokens` was not reached before the drafts, so the text would run on. Delete this function
    when that row counts them (docs/engineering/upstream.md#min_tokens).
    """
    is_short = context_lens + 1 < least
    return np.where(is_short, np.minimum(length_limits, least), length_limits)


def draft_limits(context_lens: Ints, length_limits: Ints, wanted: int, may_draft: Bools) -> Ints:
    """Maximum number of tokens to draft for each request, [R].

    If k drafts are accepted, the request is k + 1 tokens longer than its context and bonus token,
    so more than `limit - context - 2` drafts could never be used. One request's limit does not
    affect the others.

    Args:
        context_lens: tokens before the bonus token, [R].
        length_limits: maximum length in tokens, prompt included, [R].
        wanted: K.
        may_draft: False for requests still in their prompt, [R].
    """
    limits = np.minimum(length_limits - context_lens - 2, wanted)
    return np.maximum(limits, 0) * may_draft


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of one batched block forward."""

    requests: Ints
    """Batch rows of the drafted requests, [D]."""
    input_ids: npt.NDArray[np.int32]
    """Bonus token, then mask tokens, request by request, [Q]."""
    positions: npt.NDArray[np.int64]
    """[Q]."""
    slots: npt.NDArray[np.int64]
    """Scratch slots after each request's context, [Q]."""
    query_start_loc: npt.NDArray[np.int32]
    """[D + 1]."""
    seq_lens: npt.NDArray[np.int32]
    """Tokens of context plus block that attention reads, [D]."""
    offsets: npt.NDArray[np.int64]
    """Index of each row in its block, [Q]."""
    draft_lens: Ints
    """k of each request, [D]."""
    predicting: Ints
    """Rows that predict a token, request by request, [sum of k]."""


def block_inputs(
    context_lens: Ints,
    draft_lens: Ints,
    bonus_ids: Ints,
    mask_token_id: int,
    block_table: Ints,
    page_size: int,
    first_draft_row: int = 1,
) -> BlockInputs:
    """Lay out one block for each request that is drafted; widths may differ.

    Args:
        context_lens: tokens before the bonus token, which is also its position, [R].
        draft_lens: k of each request, 0 to leave it out, [R].
        bonus_ids: newest token of each request, [R].
        mask_token_id: id in all rows of a block but its first.
        block_table: cache blocks of each request, [R, max blocks].
        page_size: tokens per cache block (not per drafted block).
        first_draft_row: row of a block that predicts the first draft.
    """
    requests = np.nonzero(draft_lens > 0)[0]
    widths = draft_lens[requests] + first_draft_row
    query_start_loc = np.zeros(len(requests) + 1, dtype=np.int32)
    np.cumsum(widths, out=query_start_loc[1:])
    owners = np.repeat(requests, widths)  # [Q]
    offsets = np.arange(len(owners)) - np.repeat(query_start_loc[:-1], widths)
    positions = context_lens[owners] + offsets  # [Q] int64
    columns, inside = np.divmod(positions, page_size)
    blocks = block_table[owners, columns]
    return BlockInputs(
        requests=requests,
        input_ids=np.where(offsets == 0, bonus_ids[owners], mask_token_id).astype(np.int32),
        positions=positions,
        slots=blocks.astype(np.int64) * page_size + inside,
        query_start_loc=query_start_loc,
        seq_lens=(context_lens[requests] + widths).astype(np.int32),
        offsets=offsets,
        draft_lens=draft_lens[requests],
        predicting=np.nonzero(offsets >= first_draft_row)[0],
    )
