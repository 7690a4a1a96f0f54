"""Free drafts: a request's last tokens stood somewhere before, and what followed them may again.

No forward pass makes them (prompt look-up; suffix decoding, arXiv 2411.04975). They are looked up
in the request's own text and, if asked for, in what was written for others lately.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.recent_outputs import CAPACITY, END, RecentOutputs, recall, remember
from vllm_dflash.planning.request_rows import RequestRows
from vllm_dflash.planning.step import Foretold
from vllm_dflash.planning.suffix_index import BUCKETS, SHORTEST, longest_match, take_in


class TextIndex(NamedTuple):
    """Of every request's text, by row; see `suffix_index`."""

    newest: Ints
    """[rows, BUCKETS]."""
    before: Ints
    """[rows, longest text]."""
    read: Ints
    """Tokens that are in the index, [rows]."""
    output: Ints
    """Where the newest part of the request's output begins, [rows]."""
    foretold: Ints
    """What was foretold last, [rows, F]."""
    length: Ints
    """Of that, [rows]."""


@compiled
def look_up(
    index: TextIndex,
    recent: RecentOutputs,
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
        foretold, end = index.foretold[row], context_lens[request] + 1 - produced[request]
        for number in range(min(produced[request], sampled.shape[1])):
            text[end + number] = sampled[request, number]
        known[request] = min(index.length[row], produced[request])
        while (
            came_true[request] < known[request]
            and text[end + came_true[request]] == foretold[came_true[request]]
        ):
            came_true[request] += 1
        index.length[row] = 0
        if not produced[request]:
            continue
        if end != index.read[row]:  # it has more than was written for it: a prompt, or another one
            index.output[row] = end
        end += produced[request]
        if end < index.read[row]:  # another text than it was
            index.newest[row] = 0
            index.read[row] = 0
        if end <= SHORTEST:
            continue
        newest, before = index.newest[row], index.before[row]
        take_in(newest, before, text, index.read[row], end)
        index.read[row] = end
        # One token behind the drafts is the target's own; see `block_layout.draft_limits`.
        room = min(max(limits[request] - end - 1, 0), most)
        match, start = longest_match(before, text, before[end - 1] - 1, text, end)
        other, other_start = recall(recent, text, end)
        left = 0  # of the other's answer
        while other > match and left < room and recent.text[other_start + left] != END:
            left += 1
        if left and (left == room or match < SHORTEST):
            matches[request], lengths[request] = other, left
            for number in range(left):
                foretold[number] = recent.text[other_start + number]
        elif match >= SHORTEST:
            matches[request] = match
            lengths[request] = room
            for number in range(room):  # goes round where the text repeats itself
                foretold[number] = text[start + number % (end - start)]
        index.length[row] = lengths[request]
    return Foretold(lengths, matches, known, came_true)


class SuffixMatches:
    """Looks up what the texts of running requests foretell."""

    def __init__(
        self, max_requests: int, max_tokens: int, most: int, *, shares_outputs: bool = False
    ) -> None:
        """For so many requests at a time.

        Args:
            max_requests: of a batch.
            max_tokens: of a text.
            most: drafts of each at most (F).
            shares_outputs: whether to look them up in others' outputs as well.
        """
        # Twice the batch: requests that wait to be run again keep their index.
        num_rows = 2 * max_requests
        self._requests = RequestRows(num_rows)
        self._index = TextIndex(  # memory that is never written to is never taken up
            np.zeros((num_rows, BUCKETS), np.int32),
            np.zeros((num_rows, max_tokens), np.int32),
            np.zeros(num_rows, np.int64),
            np.zeros(num_rows, np.int64),
            np.zeros((num_rows, most), np.int64),
            np.zeros(num_rows, np.int64),
        )
        self._recent = RecentOutputs.empty(CAPACITY if shares_outputs else 0)
        nobody: Ints = np.zeros(0, np.int64)
        self._ids: Sequence[str] = ()
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
        """What became of the last look-up, and what is foretold now.

        Args:
            ids: of the requests, [R].
            texts: of these and others, [N, longest text].
            places: where in them each is, [R].
            context_lens: tokens of each before its newest one, [R].
            sampled: tokens of this step to write into them, [R, most of any]; [R, 0]: they are
                there.
            produced: how many each got, [R].
            limits: tokens that each may come to, [R].
            most: drafts of each at most, in this step.
        """
        rows, fresh = self._requests.of(ids)
        if len(fresh):
            self._index.newest[fresh] = 0
            self._index.read[fresh] = self._index.length[fresh] = 0
        self._ids, self._rows, self._places, self._ends = ids, rows, places, context_lens + 1
        return look_up(
            self._index,
            self._recent,
            rows,
            texts,
            places,
            context_lens,
            sampled,
            produced,
            limits,
            most,
        )

    def tokens(self, request: int, length: int) -> list[int]:
        """The first tokens of what the last look-up foretold for a request of the batch."""
        return self._index.foretold[self._rows[request], :length].tolist()

    def end(self, ids: Collection[str], texts: Ints) -> None:
        """Requests of the last batch have ended: forget them, and remember what was written.

        Args:
            ids: of these, and of others.
            texts: as they were at the last look-up.
        """
        for request, name in enumerate(self._ids):
            if name not in ids:
                continue
            row = self._rows[request]
            if len(self._recent.text) and self._index.read[row] == self._ends[request]:
                start, end = self._index.output[row], self._ends[request]
                remember(self._recent, texts[self._places[request], start:end])
            self._index.newest[row] = 0
            self._index.read[row] = self._index.length[row] = 0
        self._ids = ()
