"""What was written for requests that ended lately: it may be written for others as well.

All that the target wrote: also behind a stop, where nothing goes out, and for who has hung up.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.suffix_index import BUCKETS, bucket_of, longest_match, take_in

CAPACITY = 65536
"""Tokens that are kept; half a megabyte. When they are full, the older half goes."""
SHORTEST_RECENT = 4
"""Tokens of a match. Two or three in a row are soon found in somebody else's text, too."""
END = -1
"""Behind each output, so that none is taken to go on with the next one."""


class RecentOutputs(NamedTuple):
    """One text of them all, with its index; without room, [0], nothing is kept."""

    text: Ints
    """[CAPACITY]."""
    newest: Ints
    before: Ints
    length: Ints
    """Tokens in it, [1]."""

    @classmethod
    def empty(cls, capacity: int) -> RecentOutputs:
        """With room for so many tokens."""
        text, before = np.zeros((2, capacity), np.int32)
        return cls(text, np.zeros(BUCKETS, np.int32), before, np.zeros(1, np.int64))


@compiled
def remember(recent: RecentOutputs, output: Ints) -> None:
    """Add an output; of one that is longer than half the room, its first tokens."""
    text, newest, before, length = recent
    half = len(text) // 2
    size = min(len(output), half - 1)
    if size < SHORTEST_RECENT:
        return
    end = length[0]
    if end + size + 1 > len(text):
        text[:half] = text[end - half : end].copy()
        newest[:] = 0
        take_in(newest, before, text, 0, half)
        end = half
    text[end : end + size] = output[:size]
    text[end + size] = END
    length[0] = end + size + 1
    take_in(newest, before, text, end, end + size + 1)


@compiled
def recall(recent: RecentOutputs, wanted: Ints, end: int) -> tuple[int, int]:
    """Tokens that match the last ones of a text of so many, and where what followed them is."""
    if not recent.length[0] or end < SHORTEST_RECENT:
        return 0, 0
    place = recent.newest[bucket_of(wanted[end - 2], wanted[end - 1])] - 1
    size, start = longest_match(recent.before, recent.text, place, wanted, end)
    if size < SHORTEST_RECENT or recent.text[start] == END:
        return 0, 0
    return size, start
