"""Where in a text its last tokens, or another text's, stood before.

The index grows with its text: each place knows the one before it that ends with the same two
tokens, or with two that share their bucket. So a look-up compares a few places, the last ones,
however long the text is, and a text that was written to be slow to search is not. Of those that
match longest the last one counts.
"""

from __future__ import annotations

from vllm_dflash.planning import Ints
from vllm_dflash.planning.compiled import compiled

SHORTEST, LONGEST = 2, 32
"""Tokens of a match. A longer one is no surer."""
MOST_PLACES = 64
"""That a look-up in a text compares."""
BUCKETS = 4096
"""Of pairs of tokens, in a text's index."""


@compiled
def bucket_of(first: int, second: int) -> int:
    """Of a pair of tokens."""
    return (first * 40503 + second) % BUCKETS


@compiled
def take_in(newest: Ints, before: Ints, text: Ints, start: int, end: int) -> None:
    """Add a stretch of a text to its index; places count from 1, so that 0 is none.

    Args:
        newest: last place that ends with a pair of each bucket, [BUCKETS].
        before: for each place the one before it in its bucket, [longest text].
        text: [longest text].
        start: tokens that are in the index already.
        end: tokens that are to be.
    """
    for place in range(max(start, 1), end):
        bucket = bucket_of(text[place - 1], text[place])
        before[place] = newest[bucket]
        newest[bucket] = place + 1


@compiled
def longest_match(before: Ints, text: Ints, place: int, wanted: Ints, end: int) -> tuple[int, int]:
    """Tokens of a text that match the last ones wanted, and where in it stands what followed them.

    Args:
        before: of its index.
        text: [longest text].
        place: the last one that may match, from 0; less than 0 if there is none.
        wanted: a text, the same or another one.
        end: tokens it has.
    """
    best, start = 0, 0
    for _ in range(MOST_PLACES):
        if place < 0:
            break
        size, most = 0, min(LONGEST, place + 1, end)
        while size < most and text[place - size] == wanted[end - 1 - size]:
            size += 1
        if size > best:
            best, start = size, place + 1
        if best == LONGEST:
            break
        place = before[place] - 1
    return best, start
