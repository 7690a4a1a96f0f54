"""Free drafts of a batch: looked up in the texts that the model runner keeps of its requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Step
from vllm_dflash.planning.texts import SuffixMatches, append_tokens


class TextDrafts:
    """What the texts of a batch predict."""

    def __init__(
        self, max_requests: int, max_tokens: int, most: int, *, shares_outputs: bool = False
    ) -> None:
        """For so many requests at a time of up to `max_tokens`, and `most` drafts of each.

        With `shares_outputs`, what was written for requests that ended counts for all others, too.
        """
        self.most = most
        self._matches = SuffixMatches(max_requests, max_tokens, most, shares_outputs=shares_outputs)
        self._texts: Ints = np.zeros((0, 0), np.int32)

    def end(self, ids: Collection[str]) -> None:
        """Before a step: requests that have ended, if any, and leave the runner's texts with it."""
        if ids:
            self._matches.end(ids, self._texts)

    def look_up(
        self,
        step: Step,
        texts: Ints,
        places: Ints,
        length_limits: Ints,
        sampled: Ints | None = None,
        most: int | None = None,
    ) -> None:
        """Write what is predicted into the step, which has its `context_lens`.

        Args:
            step: of R requests.
            texts: the runner's, [its requests, longest text] int32.
            places: where in them the batch's texts are, [R].
            length_limits: tokens a request may come to, [R].
            sampled: the step's tokens, if they are not there yet, [R, most of any]. They are
                written where the runner will write the same ones.
            most: drafts of each in this step, if there is no room for all.
        """
        self._texts = texts
        wanted = self.most if most is None else min(self.most, most)
        if sampled is not None:
            append_tokens(texts, places, step.context_lens, sampled, step.produced)
        found = self._matches.look_up(
            step.ids,
            texts,
            places,
            step.context_lens,
            step.produced,
            length_limits.astype(np.int64, copy=False),  # another type would be compiled for
            wanted,
        )
        if found.lengths.any() or found.known.any():
            step.predicted = found

    def compare(self, step: Step, requests: Ints, drafts: Sequence[Sequence[int]]) -> None:
        """Write how far the drafted blocks of some requests say what their texts do, too."""
        if step.predicted is None:
            return
        lengths = step.predicted.lengths
        for request, drafted in zip(requests.tolist(), drafts, strict=True):
            if lengths[request]:
                predicted = self.tokens(request, min(int(lengths[request]), len(drafted)))
                differ = [ours != its for ours, its in zip(drafted, predicted, strict=False)]
                step.agreed[request] = differ.index(True) if True in differ else len(differ)

    def tokens(self, request: int, length: int) -> list[int]:
        """The first tokens of what the text of a request of the batch predicts."""
        return self._matches.tokens(request, length)
