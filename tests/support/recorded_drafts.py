"""Texts with a real drafter's drafts, and with what the texts themselves predict, at every token.

`benchmarks/record_drafts.py` makes the file. A request follows a text exactly, as greedy decoding
does, so the outcome of any of its drafts is known in advance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.texts import LONGEST, SHORTEST

FILE = Path(__file__).parents[1] / "data" / "recorded_drafts.npz"


class Predicted(NamedTuple):
    """Prediction by the tokens after the last place where a text's newest tokens occurred."""

    match: int
    """Tokens that match there."""
    length: int
    """Tokens predicted."""
    num_correct: int
    """Those that are right, up to the first wrong one."""


@dataclass(frozen=True)
class RecordedDrafts:
    """Drafts of N texts of T tokens, with blocks of K drafts."""

    prompt_lengths: Ints
    """Prompt lengths, [N]."""
    confidence: Floats
    """The drafter's confidence in the block after each token, [N, T, K]."""
    block_true: Ints
    """Drafts of that block up to the first wrong one, [N, T]."""
    predicted: Ints
    """The three numbers of `Predicted` for each token, [N, T, 3]."""

    @property
    def width(self) -> int:
        """Drafts of a block, K."""
        return self.confidence.shape[2]

    def only(self, texts: Ints) -> RecordedDrafts:
        """Return some of the texts."""
        return RecordedDrafts(
            self.prompt_lengths[texts],
            self.confidence[texts],
            self.block_true[texts],
            self.predicted[texts],
        )

    def joined(self, other: RecordedDrafts) -> RecordedDrafts:
        """Return these texts, then the others."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return RecordedDrafts(*(np.concatenate(pair) for pair in pairs))

    def with_useless_blocks(self) -> RecordedDrafts:
        """Return drafts whose blocks are as confident as these, and never right."""
        return replace(self, block_true=np.zeros_like(self.block_true))


class Recording(NamedTuple):
    """The file's N texts of T tokens after their prompts, with blocks of K drafts."""

    texts: list[Ints]
    prompt_lengths: Ints
    drafts: Ints
    """Drafts after each token, [N, T, K]."""
    confidence: Floats
    """The drafter's confidence in them, [N, T, K]."""
    kinds: list[Ints]
    """Texts of each kind: greedy, drawn, copies."""


@cache
def recording() -> Recording:
    """Return what the file holds."""
    with np.load(FILE) as file:
        arrays = {name: file[name].astype(np.int64) for name in file.files}
    ends = np.cumsum(arrays["prompt_lengths"] + arrays["lengths"])
    texts = np.split(arrays["tokens"], ends[:-1])
    shape = len(texts), int(arrays["lengths"][0]), arrays["drafts"].shape[1]  # all have one length
    confidence = np.maximum(arrays["confidence"].reshape(shape), 1) / 255
    kinds = np.split(np.arange(len(texts)), np.cumsum(arrays["kinds"])[:-1])
    drafts = arrays["drafts"].reshape(shape)
    return Recording(texts, arrays["prompt_lengths"], drafts, confidence, kinds)


@cache
def recorded_drafts() -> tuple[RecordedDrafts, RecordedDrafts, RecordedDrafts]:
    """Return drafts of texts that the target writes greedily, of drawn ones, of edited copies."""
    texts, prompts, drafts, confidence, kinds = recording()
    shape = drafts.shape
    block_true, predicted = np.zeros(shape[:2], np.int64), np.zeros((*shape[:2], 3), np.int64)
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        for place in range(shape[1]):
            end, block = prompt + place + 1, drafts[number, place]
            block_true[number, place] = alike(block, text[end:])
            predicted[number, place] = predicts(text, end, shape[2])
    every = RecordedDrafts(prompts, confidence, block_true, predicted)
    greedy, drawn, copies = kinds
    return every.only(greedy), every.only(drawn), every.only(copies)


def alike(one: Ints, other: Ints) -> int:
    """Return the number of first tokens that two texts have in common."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count


def longest_match(text: Ints, end: int) -> tuple[int, int]:
    """Return how many of a text's tokens before `end` occurred before, and what followed them: the
    longest such match, of several the latest one; (0, 0) if it is too short."""
    best, start = 0, 0
    for place in np.flatnonzero(text[: end - 1] == text[end - 1])[::-1]:  # the latest ones first
        size = alike(text[place::-1], text[end - 1 :: -1][:LONGEST])
        if size > best:
            best, start = size, int(place) + 1
    return (best, start) if best >= SHORTEST else (0, 0)


def predicts(text: Ints, end: int, most: int) -> Predicted:
    """Return what a text's first `end` tokens predict of up to so many more."""
    best, start = longest_match(text, end)
    if not best:
        return Predicted(0, 0, 0)
    tokens = text[start + np.arange(most) % (end - start)]  # it wraps around
    return Predicted(best, most, alike(tokens, text[end:]))
