"""Free drafts: where a request's last tokens occurred before, what followed may follow again.

They need no forward pass (prompt look-up; suffix decoding, arXiv 2411.04975).

A text's index grows with it: each place knows the previous one that ends with the same two tokens.
So a look-up compares only the last few places, however long the text is, and a text that was
written to be slow to search is not. The longest match counts; of equally long ones, the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Predicted

SHORTEST, LONGEST = 2, 32
"""Shortest and longest match, in tokens. A longer one is no surer."""
MOST_PLACES = 64
"""Most places that a look-up in a text compares."""


class Text:
    """A request's text, and what it predicts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.predicted: list[int] = []
        self._newest: dict[int, int] = {}  # the last place that ends with two tokens
        self._before: list[int] = []  # for each place, the previous one that ends as it does, or -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        text, newest, before = self.tokens, self._newest, self._before
        last = text[-1] if text else -1
        for token in tokens:
            pair = last << 32 | token
            before.append(newest.get(pair, -1))
            newest[pair] = len(text)
            text.append(token)
            last = token

    def longest_match(self) -> tuple[int, int]:
        """Return how many last tokens occurred before, and where what followed them is."""
        text, before, end = self.tokens, self._before, len(self.tokens) - 1
        best, start, place = 0, 0, before[end]
        for _ in range(MOST_PLACES):
            if place < best or best == LONGEST:  # none, or no room for a longer match
                break
            if text[place - best] == text[end - best]:  # else it is no longer
                size, most = SHORTEST, min(LONGEST, place + 1)
                while size < most and text[place - size] == text[end - size]:
                    size += 1
                if size > best:
                    best, start = size, place + 1
            place = before[place]
        return best, start

    def predict(self, most: int) -> int:
        """Predict up to so many tokens. Returns how long the match is."""
        size, start = self.longest_match()
        self.predicted = self.tokens[start : start + most] if size else []
        while size and len(self.predicted) < most:  # it goes round where the text repeats itself
            self.predicted += self.predicted[: most - len(self.predicted)]
        return size

    def came_true(self, tokens: Sequence[int]) -> int:
        """Return how many predicted tokens are these, up to the first that is not."""
        count = 0
        for one, other in zip(self.predicted, tokens, strict=False):
            if one != other:
                break
            count += 1
        return count


class NgramIndex:
    """Looks up what the texts of running requests predict; the same on every rank."""

    def __init__(self, max_requests: int, most: int) -> None:
        """Keep the texts of `max_requests` requests that run, and as many that wait to be run
        again; predict up to `most` (F) tokens."""
        self._max_requests, self._most = max_requests, most
        self._texts: dict[str, Text] = {}
        self._batch: list[Text] = []

    def look_up(
        self,
        ids: Sequence[str],
        texts: Ints,
        context_lens: Ints,
        sampled: Ints,
        produced: Ints,
        limits: Ints,
        most: int,
    ) -> Predicted:
        """Return what became of the last predictions, verified or not, and how long the next are.

        The longer the match, the likelier a prediction is taken to be (`acceptance.TRUST`), until
        it is learned how often such predictions come true.

        Args:
            ids: ids of the requests, [R].
            texts: texts of these requests without the newest tokens, [R or more, longest text].
            context_lens: tokens of each text before its newest one, [R].
            sampled: the newest tokens of each request, [R, most of any].
            produced: how many those are, [R].
            limits: most tokens that each text may reach, [R].
            most: most drafts of each request in this step.
        """
        if len(self._texts) > 2 * self._max_requests:
            self._texts = {name: self._texts[name] for name in ids if name in self._texts}
        self._batch, found = [], []
        rows = zip(
            *(ids, sampled.tolist(), texts, (context_lens + 1).tolist()),
            *(produced.tolist(), limits.tolist()),
            strict=False,
        )
        for name, tokens, before, end, new, limit in rows:
            text = self._texts.get(name)
            if text is None or len(text.tokens) > end - new:  # a different text than before
                text = self._texts[name] = Text()
            self._batch.append(text)
            del tokens[new:]
            known, came_true = min(len(text.predicted), new), text.came_true(tokens)
            size, text.predicted = 0, []
            if new:
                if len(text.tokens) < end - new:
                    text.extend(before[len(text.tokens) : end - new].tolist())
                text.extend(tokens)
                # One token after the drafts is the target's own; see `block_layout.draft_limits`.
                size = text.predict(min(max(limit - end - 1, 0), most, self._most))
            found.append((len(text.predicted), size, known, came_true))
        return Predicted._make(np.array(found, np.int64).reshape(-1, 4).T)

    def tokens(self, request: int, length: int) -> list[int]:
        """Return the first tokens of the last prediction for a request of the batch."""
        return self._batch[request].predicted[:length]

    def restart(self, ids: Collection[str]) -> None:
        """Forget the texts of requests that have ended, join the batch or come back to it."""
        for name in ids:
            self._texts.pop(name, None)
