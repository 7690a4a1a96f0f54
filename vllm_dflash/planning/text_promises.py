"""What requests' texts will predict two steps from now."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.chances import Chances, expect_texts, learn_texts
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.step import Predicted

TYPICAL_RATE = 0.05
"""Weight of the newest look-up in what one promises behind a match that has ended."""


class TextPromises(NamedTuple):
    """By rows of requests; arrays that are written."""

    survival: Floats
    """Of what each text is expected to predict next, [rows, K]."""
    has_failed: Bools
    """Whether the last match has ended, [rows]."""
    typical: Floats
    """Survival of what is predicted where it has, [K]."""

    @classmethod
    def of(cls, num_rows: int, max_draft: int) -> TextPromises:
        """Of nothing yet."""
        return cls(
            np.zeros((num_rows, max_draft)), np.ones(num_rows, np.bool_), np.zeros(max_draft)
        )

    def forget(self, rows: Ints) -> None:
        """They are new requests' from now on."""
        self.survival[rows], self.has_failed[rows] = self.typical, True


@compiled
def learn_promises(
    promises: TextPromises,
    chances: Chances,
    rows: Ints,
    produced: Ints,
    verified: Ints,
    predicted: Predicted,
    found: Floats,
) -> None:
    """From what became of what the texts of R requests predicted.

    Args:
        promises: to write.
        chances: of texts, which learn as well.
        rows: of the requests, [R].
        produced: tokens that each has got, [R]; 0: it is still in its prompt.
        verified: drafts of each that were its text's, [R].
        predicted: the look-up, and what is known of it.
        found: survival of its drafts, [R, K].
    """
    typical, width = promises.typical, found.shape[1]
    for request in range(len(rows)):
        row = rows[request]
        if promises.has_failed[row] and produced[request]:
            for draft in range(width):
                typical[draft] += TYPICAL_RATE * (found[request, draft] - typical[draft])
        chances.num_verified[row] = verified[request]
    learn_texts(chances, rows, verified, predicted)
    matches, lengths = predicted.matches + produced, np.zeros(len(rows), np.int64)
    for request in range(len(rows)):
        known = predicted.known[request]
        goes_on = known > 0 and predicted.came_true[request] == known
        promises.has_failed[rows[request]] = not goes_on
        # What goes round in circles predicts no more than a circle, again and again.
        lengths[request] = predicted.lengths[request] * goes_on
    # A match that has gone on so far is one of so many tokens more. By then another step will have
    # been through all that it predicts now.
    going = expect_texts(chances, rows, matches, lengths)
    for request in range(len(rows)):
        still = going[request, lengths[request] - 1] if lengths[request] else 0.0
        for draft in range(width):
            promise = typical[draft] + still * (going[request, draft] - typical[draft])
            promises.survival[rows[request], draft] = promise
