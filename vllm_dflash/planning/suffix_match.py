"""Free drafts: a request's last tokens stood in its text before, and what followed them may again.

No forward pass makes them (prompt look-up; suffix decoding, arXiv 2411.04975). Every text has an
index that grows with it: each place knows the one before it that ends with the same two tokens, or
with two that share their bucket. So a look-up compares a few places, the last ones, however long
the text is, and a text that was written to be slow to search is not. Of those that match longest
the last one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Foretold

SHORTEST, LONGEST = 2, 32
"""Tokens of a match. A longer one is no surer."""
MOST_PLACES = 64
"""That a look-up compares."""
BUCKETS = 4096
"""Of pairs of tokens, in a text's index."""


class TextIndex(NamedTuple):
    """Of every request's text, by row; places count from 1, so that 0 is none."""

    newest: Ints
    """Last place that ends with a pair of each bucket, [rows, BUCKETS]."""
    before: Ints
    """For each place the one before it in its bucket, [rows, longest text]."""
    read: Ints
    """Tokens that are in the index, [rows]."""
    start: Ints
    """Where in the text stands what was foretold last, [rows]."""
    length: Ints
    """Of that, [rows]."""


@compiled
def take_in(index: TextIndex, row: int, text: Ints, end: int) -> None:
    """Add all that is new of a text of so many tokens."""
    newest, before = index.newest[row], index.before[row]
    for place in range(max(index.read[row], 1), end):
        bucket = (text[place - 1] * 40503 + text[place]) % BUCKETS
        before[place] = newest[bucket]
        newest[bucket] = place + 1
    index.read[row] = end


@compiled
def longest_match(index: TextIndex, row: int, text: Ints, end: int) -> tuple[int, int]:
    """Tokens that match the last ones, and where in the text stands what followed them."""
    best, start = 0, 0
    place = index.before[row, end - 1] - 1
    for _ in range(MOST_PLACES):
        if place < 0:
            break
        size = 0
        while size < LONGEST and size <= place and text[place - size] == text[end - 1 - size]:
            size += 1
        if size > best:
            best, start = size, place + 1
        if best == LONGEST:
            break
        place = index.before[row, place] - 1
    return best, start


@compiled
def look_up(
    index: TextIndex,
    rows: Ints,
    texts: Ints,
    places: Ints,
    context_lens: Ints,
    sampled: Ints,
    produced: Ints,
    limits: Ints,
    most: int,
) -> Foretold:
    """Take in the tokens of a step, and see what was and what is foretold; see `SuffixMatches`."""
    num_requests = len(rows)
    lengths, matches = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    known, came_true = np.zeros(num_requests, np.int64), np.zeros(num_requests, np.int64)
    for request in range(num_requests):
        row, text = rows[request], texts[places[request]]
        end = context_lens[request] + 1 - produced[request]
        for number in range(min(produced[request], sampled.shape[1])):
            text[end + number] = sampled[request, number]
        known[request] = min(index.length[row], produced[request])
        if known[request]:
            start = index.start[row]
            while (
                came_true[request] < known[request]
                and text[end + came_true[request]]
                == text[start + came_true[request] % (end - start)]
            ):
                came_true[request] += 1
        index.length[row] = 0
        end += produced[request]
        if not produced[request] or end < SHORTEST + 1:
            continue
        if end < index.read[row]:  # another text than it was
            index.newest[row] = 0
            index.read[row] = 0
        take_in(index, row, text, end)
        match, start = longest_match(index, row, text, end)
        if match >= SHORTEST:
            # One behind the drafts is the target's own.
            length = min(max(limits[request] - end - 1, 0), most)
            lengths[request] = index.length[row] = length
            matches[request], index.start[row] = match, start
    return Foretold(lengths, matches, known, came_true)


@compiled
def copy_foretold(index: TextIndex, row: int, text: Ints, end: int, length: int) -> Ints:
    """What is foretold behind a text of so many tokens, [length]; goes round where that repeats."""
    start = index.start[row]
    found = np.empty(length, np.int64)
    for number in range(length):
        found[number] = text[start + number % (end - start)]
    return found


class SuffixMatches:
    """Looks up what the texts of running requests foretell."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        """For so many requests at a time, with texts of up to `max_tokens`."""
        # Twice the batch: requests that wait to be run again keep their index.
        num_rows = 2 * max_requests
        self._requests = RequestRows(num_rows)
        self._index = TextIndex(  # memory that is never written to is never taken up
            np.zeros((num_rows, BUCKETS), np.int32),
            np.zeros((num_rows, max_tokens + 1), np.int32),
            np.zeros(num_rows, np.int64),
            np.zeros(num_rows, np.int64),
            np.zeros(num_rows, np.int64),
        )
        nobody: Ints = np.zeros(0, np.int64)
        self._rows = self._places = self._ends = nobody

    def look_up(
        self,
        ids: Sequence[str],
        texts: Ints,
        places: Ints,
        context_lens: Ints,
        sampled: Ints,
        produced: Ints,
        limits: Ints,
        most: int,
    ) -> Foretold:
        """What became of the last look-up, and what the texts foretell now.

        Args:
            ids: of the requests, [R].
            texts: of these and others, [N, longest text].
            places: where in them each is, [R].
            context_lens: tokens of each before its newest one, [R].
            sampled: tokens of this step to write into them, [R, most of any]; [R, 0]: they are
                there.
            produced: how many each got, [R].
            limits: tokens that each may come to, [R].
            most: drafts of each at most.
        """
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._index.newest[fresh] = 0
            self._index.read[fresh] = self._index.length[fresh] = 0
        self._rows, self._places, self._ends = rows, places, context_lens + 1
        return look_up(
            self._index, rows, texts, places, context_lens, sampled, produced, limits, most
        )

    def tokens(self, request: int, texts: Ints, length: int) -> list[int]:
        """The first tokens of what the last look-up foretold for a request of the batch."""
        text = texts[self._places[request]]
        row, end = self._rows[request], self._ends[request]
        return copy_foretold(self._index, row, text, end, length).tolist()
