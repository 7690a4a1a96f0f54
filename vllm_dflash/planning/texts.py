"""Free drafts: where a request's last tokens occurred before, what followed may follow again.

They need no forward pass (prompt look-up; suffix decoding, arXiv 2411.04975).

A text's index grows with it: each position knows the previous one that ends with the same two
tokens. So a look-up compares only the last few candidates, however long the text is, and a text
that was written to be slow to search is not. The longest match counts; of equally long ones, the
last.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Predicted, StepRecord

SHORTEST, LONGEST = 2, 32
"""Shortest and longest match, in tokens. A longer one is no surer."""
MAX_CANDIDATES = 64
"""Most positions that a look-up in a text compares."""


class Text:
    """A request's text, and what it predicts."""

    def __init__(self) -> None:
        # Arrays: lists take more of the processor's cache, and twice as long in many long texts.
        self.tokens = array("i")
        self.predicted: list[int] = []
        self.match = 0  # how many last tokens had occurred before that
        self._newest: dict[int, int] = {}  # the last position that ends with two tokens
        self._before = array("i")  # for each position, the previous one that ends as it does, or -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        text, newest, before = self.tokens, self._newest, self._before
        last = text[-1] if text else -1
        for position, token in enumerate(tokens, len(text)):
            pair = last << 32 | token
            before.append(newest.get(pair, -1))
            newest[pair] = position
            text.append(token)
            last = token

    def longest_match(self) -> tuple[int, int]:
        """Return how many last tokens occurred before, and where what followed them is."""
        text, before, end = self.tokens, self._before, len(self.tokens) - 1
        best, start, position = 0, 0, before[end]
        for _ in range(MAX_CANDIDATES):
            if position < best or best == LONGEST:  # none, or no room for a longer match
                break
            if text[position - best] == text[end - best]:  # else it is no longer
                size, most = SHORTEST, min(LONGEST, position + 1)
                while size < most and text[position - size] == text[end - size]:
                    size += 1
                if size > best:
                    best, start = size, position + 1
            position = before[position]
        return best, start

    def predict(self, most: int) -> None:
        """Predict up to so many tokens."""
        self.match, start = self.longest_match()
        self.predicted = self.tokens[start : start + most].tolist() if self.match else []
        while self.match and len(self.predicted) < most:  # a text that repeats itself goes round
            self.predicted += self.predicted[: most - len(self.predicted)]


class NgramIndex:
    """Looks up what the texts of running requests predict; the same on every rank."""

    def __init__(self, max_requests: int) -> None:
        """Keep the texts of `max_requests` requests that run, and as many that wait to be run
        again."""
        self._most_texts = 2 * max_requests
        self._texts: dict[str, Text] = {}
        self._batch: list[Text] = []

    def look_up(
        self, step: StepRecord, texts: Ints, sampled: Ints, limits: Ints, most: int
    ) -> Predicted:
        """Return what became of the last predictions, verified or not, and how long the next are.

        The longer the match, the likelier a prediction is taken to be (`acceptance.TRUST`), until
        it is learned how often such predictions come true.

        Args:
            step: a step with `ids`, `produced` and `context_lens`.
            texts: texts of these requests without the newest tokens, [R or more, longest text].
            sampled: the newest tokens of each request, [R, most of any].
            limits: most tokens that each text may reach, [R].
            most: most drafts of each request in this step.
        """
        numbers = (step.context_lens + 1, step.produced, limits)
        rows = zip(
            step.ids, texts, sampled.tolist(), *(each.tolist() for each in numbers), strict=False
        )
        self._batch, found = [], []
        for name, before, tokens, end, new, limit in rows:
            text = self._texts.get(name)
            if text is None or len(text.tokens) > end - new:  # a different text than before
                text = self._texts[name] = Text()
            self._batch.append(text)
            known, true, last_match = min(len(text.predicted), new), 0, text.match
            while true < known and text.predicted[true] == tokens[true]:
                true += 1
            if new:
                if len(text.tokens) < end - new:
                    text.extend(before[len(text.tokens) : end - new].tolist())
                text.extend(tokens[:new])
                # One token after the drafts is the target's own; see `block_layout.draft_limits`.
                text.predict(min(max(limit - end - 1, 0), most))
            else:
                text.match, text.predicted = 0, []
            found.append((len(text.predicted), text.match, known, true, last_match))
        if len(self._texts) > self._most_texts:
            self._texts = dict(zip(step.ids, self._batch, strict=True))
        return Predicted._make(np.array(found, np.int64).reshape(-1, 5).T)

    def tokens(self, request: int, length: int) -> list[int]:
        """Return the first tokens of the last prediction for a request of the batch."""
        return self._batch[request].predicted[:length]

    def forget(self, ids: Collection[str]) -> None:
        """Forget the texts of these requests, which end, join the batch, or come back to it."""
        for name in ids:
            self._texts.pop(name, None)
