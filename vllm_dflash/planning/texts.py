"""Free drafts: where a request's last tokens occurred before, what followed may follow again.

They need no forward pass (prompt look-up; suffix decoding, arXiv 2411.04975).

A text's index grows with it: each place knows the previous one that ends with the same two tokens,
or with two that share their bucket. So a look-up compares only the last few places, however long
the text is, and a text that was written to be slow to search is not. The longest match counts; of
equally long ones, the last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.step import NO_ROWS, Predicted, RequestRows

SHORTEST, LONGEST = 2, 32
"""Shortest and longest match, in tokens. A longer one is no surer."""
MOST_PLACES = 64
"""Most places that a look-up in a text compares."""
BUCKETS, PAIR_FACTOR = 4096, 40503
"""Buckets for pairs of tokens in a text's index: the first times the factor, plus the second."""


@compiled
def index_tokens(newest: Ints, before: Ints, text: Ints, start: int, end: int) -> None:
    """Add a stretch of a text to its index; places count from 1, so that 0 means none.

    Args:
        newest: last place that ends with a pair of each bucket, [BUCKETS].
        before: for each place, the previous one in its bucket, [longest text].
        text: tokens of the text, [longest text].
        start: number of tokens that are already in the index.
        end: number of tokens that will be.
    """
    for place in range(max(start, 1), end):
        bucket = (text[place - 1] * PAIR_FACTOR + text[place]) % BUCKETS
        before[place] = newest[bucket]
        newest[bucket] = place + 1


@compiled
def longest_match(before: Ints, text: Ints, end: int) -> tuple[int, int]:
    """Return how many last tokens of a text occurred before, and where in it what followed is.

    Args:
        before: see `index_tokens`.
        text: tokens of the text, [longest text].
        end: number of tokens in the text.
    """
    best, start, place = 0, 0, before[end - 1] - 1
    for _ in range(MOST_PLACES):
        if place < 0:
            break
        size, most = 0, min(LONGEST, place + 1)
        while size < most and text[place - size] == text[end - 1 - size]:
            size += 1
        if size > best:
            best, start = size, place + 1
        if best == LONGEST:
            break
        place = before[place] - 1
    return best, start


class TextIndex(NamedTuple):
    """Index of every request's text, by row."""

    newest: Ints
    """See `index_tokens`, [rows, BUCKETS]."""
    before: Ints
    """See `index_tokens`, [rows, longest text]."""
    read: Ints
    """Tokens that are in the index, [rows]."""
    predicted: Ints
    """The last prediction, [rows, F]."""
    length: Ints
    """Prediction lengths, [rows]."""

    def forget(self, rows: Ints) -> None:
        """Reset rows that now belong to other requests."""
        self.newest[rows] = 0
        self.read[rows] = self.length[rows] = 0


@compiled
def append_tokens(texts: Ints, context_lens: Ints, sampled: Ints, produced: Ints) -> None:
    """Append the tokens of a step, [R, most of any], to the texts of R requests; see
    `NgramIndex.look_up`."""
    for request in range(len(produced)):
        start = context_lens[request] + 1 - produced[request]
        for number in range(produced[request]):
            texts[request, start + number] = sampled[request, number]


@compiled
def look_up(index: TextIndex, texts: Ints, requests: Ints, most: int) -> Predicted:
    """Take in the tokens of a step, check the last prediction, and make the next one.

    Args:
        index: index of the texts.
        texts: see `NgramIndex.look_up`.
        requests: rows in the index, `context_lens`, `produced` and `limits` of the requests; see
            there, [4, R].
        most: see there.
    """
    rows, context_lens, produced, limits = requests
    lengths, matches, known, came_true = np.zeros((4, len(rows)), np.int64)
    for request in range(len(rows)):
        row, text = rows[request], texts[request]
        predicted, end = index.predicted[row], context_lens[request] + 1 - produced[request]
        known[request] = min(index.length[row], produced[request])
        while (
            came_true[request] < known[request]
            and text[end + came_true[request]] == predicted[came_true[request]]
        ):
            came_true[request] += 1
        index.length[row] = 0
        if not produced[request]:
            continue
        end += produced[request]
        newest, before = index.newest[row], index.before[row]
        if end < index.read[row]:  # a different text than before
            index.read[row] = 0
            for bucket in range(BUCKETS):
                newest[bucket] = 0
        if end <= SHORTEST:
            continue
        index_tokens(newest, before, text, index.read[row], end)
        index.read[row] = end
        # One token after the drafts is the target's own; see `block_layout.draft_limits`.
        room = min(max(limits[request] - end - 1, 0), most)
        match, start = longest_match(before, text, end)
        if match >= SHORTEST:
            matches[request], lengths[request] = match, room
            for number in range(room):  # goes round where the text repeats itself
                predicted[number] = text[start + number % (end - start)]
        index.length[row] = lengths[request]
    return Predicted(lengths, matches, known, came_true)


class NgramIndex:
    """Looks up what the texts of running requests predict; the same on every rank."""

    def __init__(self, max_requests: int, max_tokens: int, most: int) -> None:
        """Make room for `max_requests` requests at a time.

        Args:
            max_requests: most requests of a batch.
            max_tokens: most tokens of a text.
            most: most drafts of each request (F).
        """
        # Twice the batch: requests that wait to be run again keep their index.
        num_rows = 2 * max_requests
        self._requests = RequestRows(num_rows)
        self._index = TextIndex(  # memory that is never written to is never taken up
            np.zeros((num_rows, BUCKETS), np.int32),
            np.zeros((num_rows, max_tokens), np.int32),
            np.zeros(num_rows, np.int64),
            np.zeros((num_rows, most), np.int64),
            np.zeros(num_rows, np.int64),
        )
        self._rows = NO_ROWS
        # Compile all of it now (for seconds, the first time on a machine): no request waits for it.
        text, one = np.zeros((1, max(max_tokens, 4)), np.int32), np.ones(1, np.int64)
        append_tokens(text, 2 * one, np.zeros((1, 2), np.int32), 2 * one)
        self.look_up([""], text, 2 * one, 2 * one, 3 * one, 1)
        self._index.forget(self._rows)
        self._requests, self._rows = RequestRows(num_rows), NO_ROWS

    def look_up(
        self,
        ids: Sequence[str],
        texts: Ints,
        context_lens: Ints,
        produced: Ints,
        limits: Ints,
        most: int,
    ) -> Predicted:
        """Return what became of the last predictions, verified or not, and how long the next are.

        The longer the match, the likelier a prediction is taken to be (`acceptance.TRUST`), until
        it is learned how often such predictions come true.

        Args:
            ids: ids of the requests, [R].
            texts: texts of these requests, [R or more, longest text].
            context_lens: tokens of each text before its newest one, [R].
            produced: tokens that each request got, [R].
            limits: most tokens that each text may reach, [R].
            most: most drafts of each request in this step.
        """
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._index.forget(fresh)
        self._rows = rows
        requests = np.array([rows, context_lens, produced, limits], np.int64)
        return look_up(self._index, texts, requests, most)

    def tokens(self, request: int, length: int) -> list[int]:
        """Return the first tokens of the last prediction for a request of the batch."""
        return self._index.predicted[self._rows[request], :length].tolist()

    def restart(self, ids: Collection[str]) -> None:
        """Read the texts of these requests anew, as they join the batch or come back to it."""
        known = self._requests.known(ids)
        if len(known):
            self._index.forget(known)
