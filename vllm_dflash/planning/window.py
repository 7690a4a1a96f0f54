"""Draft windows: whether blocks attend to all of a long context or to its last tokens only.

The attention of a block over a long context takes time, and a drafter may accept more or less with
a context that is far longer than those it was trained on. Neither is known beforehand, so all ways
are measured for each class of context lengths: 1,024 to 2,047 tokens, 2,048 to 4,095, and so on.
The way that yields most tokens per second is used. The others are probed now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

import numpy as np

from vllm_dflash.planning import Ints

TOKENS = 1024, 256
"""Tokens of each window that is tried. Attention to 1,024 tokens takes little time beside the
weights of a drafter. A drafter trained on short texts may need 256: docs/benchmarks.md."""
LEAST_CONTEXT = 1024
"""Tokens of the shortest context that may have a window."""

TRIAL_STEPS = 4
"""First drafted steps of each way. They take turns and are few: if drafting seems not to pay with
one of them, which takes a dozen steps to see, hardly any step is drafted from then on."""
FIRST_STEPS, MOST_STEPS = 32, 4096
"""Drafted steps between two probes of a class: at first, and at most. The number doubles with each
probe that changes nothing."""
PROBE_STEPS = 16
"""Drafted steps of a probe."""
LEAST_GAIN = 1.01
"""Ratio by which the other way must be better."""
PRIOR = 64.0
"""Verified blocks that the acceptance of both ways together counts for in the estimate of each: a
few blocks say little about their difference."""
MEMORY = 4096.0
"""Verified blocks that are remembered; older ones count half, and so on."""
RATE = 0.1
"""Weight of the newest step in mean times. So after a probe, both means are recent, of nearly the
same batch."""
LARGEST_SURPRISE = 3.0
"""Multiple of the mean that one step's time counts for at most."""


class Window(NamedTuple):
    """What the blocks of a step attend to."""

    tokens: int = 0
    """Tokens of context at least; 0: all of it."""
    shortest: int = 0
    """Requests with a shorter context attend to all of it."""
    octave: int = -1
    """Class of the batch's mean context length; -1: below all classes."""

    def skipped(self, context_lens: Ints, unit: int) -> Ints:
        """Return how many tokens at the start of each context are not attended to, [R].

        Whole cache blocks are left out, so these are multiples of `unit` tokens.
        """
        if not self.tokens:
            return np.zeros_like(context_lens)
        before = np.maximum(context_lens - self.tokens, 0) // unit * unit
        return np.where(context_lens >= self.shortest, before, 0)

    def attended(self, context_lens: Ints) -> Ints:
        """Return how many tokens of each context blocks attend to, to within a cache block, [R]."""
        return context_lens - self.skipped(context_lens, 1) if self.tokens else context_lens

    def attended_in_all(self, context_lens: Ints) -> float:
        """Return how many tokens the blocks of all R requests attend to."""
        return float(self.attended(context_lens).sum())


WHOLE = Window()


@dataclass
class Measured:
    """What a part of steps has taken in one class; of blocks, also what they have brought."""

    verified: float = 0.0
    """Verified blocks."""
    accepted: float = 0.0
    """Accepted drafts of these."""
    seconds: float = 0.0
    """Mean time, per drafted request."""
    steps: int = 0
    """Steps that were timed."""

    def add_drafts(self, verified: int, accepted: int) -> None:
        """Count verified blocks and their accepted drafts."""
        self.verified, self.accepted = self.verified + verified, self.accepted + accepted
        if self.verified > MEMORY:
            self.verified, self.accepted = self.verified / 2, self.accepted / 2

    def add_seconds(self, seconds: float) -> None:
        """Count the time of one step, per drafted request."""
        if self.steps:
            seconds = min(seconds, LARGEST_SURPRISE * self.seconds)
        self.steps += 1
        self.seconds += max(1.0 / self.steps, RATE) * (seconds - self.seconds)

    @property
    def acceptance(self) -> float:
        """Accepted drafts per verified block."""
        return self.accepted / self.verified if self.verified else 0.0


class Chosen(NamedTuple):
    """Window of a step's blocks."""

    window: Window
    in_use: Window
    """The same unless another one is being tried: what later blocks attend to, most likely."""
    is_better: bool = False
    """Whether `in_use` has just been found to be better than the one before."""


class ContextClass:
    """One class of context lengths: all ways as measured, and which one is in use."""

    def __init__(self, num_ways: int) -> None:
        self.ways = [Measured() for _ in range(num_ways)]
        """Blocks without a window, then with each."""
        self.rest = Measured()
        """Steps without their blocks."""
        self.in_use, self._other = 0, 0
        """Ways: in use, and probed last."""
        self._is_probing = False
        self._trial_left = TRIAL_STEPS * num_ways
        self._steps_left, self._interval = 0, FIRST_STEPS
        """Steps until a probe begins or ends, and between the last probe and the next."""

    @property
    def is_tried(self) -> bool:
        """Whether the first trial is over."""
        return self._trial_left <= 0

    def start_like(self, other: ContextClass) -> None:
        """Start with what is in use in another class, instead of a trial of all ways."""
        self.in_use, self._trial_left, self._steps_left = other.in_use, 0, self._interval

    def choose_way(self, steps: int) -> int:
        """Return which way the next step takes, `steps` steps after the last one."""
        if self._trial_left > 0:
            self._trial_left -= steps
            if self._trial_left > 0:
                return self._next_way()
            self._decide(range(len(self.ways)))
            self._interval = FIRST_STEPS
            self._steps_left = steps + self._interval
        self._steps_left -= steps
        if self._steps_left <= 0:
            if self._is_probing:
                self._decide([self._other])
            elif self._next_way() == self.in_use:
                self._next_way()
            self._is_probing = not self._is_probing
            self._steps_left = PROBE_STEPS if self._is_probing else self._interval
        return self._other if self._is_probing else self.in_use

    def rates(self) -> list[float]:
        """Return the tokens per second of a request by each way; 0: unknown."""
        verified = sum(way.verified for way in self.ways)
        mean = sum(way.accepted for way in self.ways) / max(verified, 1.0)

        def rate(way: Measured) -> float:
            accepted = (way.accepted + PRIOR * mean) / (way.verified + PRIOR)
            return (1.0 + accepted) / (self.rest.seconds + way.seconds) if way.steps else 0.0

        return [*map(rate, self.ways)]

    def _next_way(self) -> int:
        self._other = (self._other + 1) % len(self.ways)
        return self._other

    def _decide(self, tried: Sequence[int]) -> None:
        """Use the best of the ways that have just been tried, if it is better than the one in use.
        The others were measured in another batch, perhaps."""
        rates = self.rates()
        best = max(tried, key=rates.__getitem__)
        if rates[best] > LEAST_GAIN * rates[self.in_use] > 0.0:
            self.in_use, self._interval = best, FIRST_STEPS
        else:
            self._interval = min(2 * self._interval, MOST_STEPS)


class WindowChooser:
    """Chooses the window of each drafted step, and learns from what became of it."""

    def __init__(self, longest: int) -> None:
        """Choose for contexts of up to `longest` tokens."""
        self.tokens = 0, *TOKENS
        count = 1 + int(log2(max(longest / LEAST_CONTEXT, 1.0)))
        self.classes = [ContextClass(len(self.tokens)) for _ in range(count)]

    def choose(self, context_lens: Ints, steps: int = 1) -> Chosen:
        """Return the window for blocks of these requests, `steps` drafted steps after the last."""
        mean = float(context_lens.mean()) if len(context_lens) else 0.0
        if mean < LEAST_CONTEXT:
            return Chosen(WHOLE, WHOLE)
        octave = min(int(log2(mean / LEAST_CONTEXT)), len(self.classes) - 1)
        found = self.classes[octave]
        if not (found.is_tried or found.rest.steps):
            tried = [one for one in self.classes[:octave] if one.is_tried]
            if tried:
                found.start_like(tried[-1])
        before, way = found.in_use, found.choose_way(steps)
        run, in_use = (
            Window(self.tokens[one], LEAST_CONTEXT, octave) for one in (way, found.in_use)
        )
        return Chosen(run, in_use, found.in_use != before)

    def observe_drafts(self, window: Window, verified: int, accepted: int) -> None:
        """Learn what became of blocks that were drafted with `window`."""
        if window.octave >= 0 and verified:
            self._way(window).add_drafts(verified, accepted)

    def observe_seconds(
        self, window: Window, num_blocks: int, block_seconds: float, rest_seconds: float
    ) -> None:
        """Learn what a step's blocks took, and the rest of the step."""
        if window.octave < 0 or not num_blocks:
            return
        self._way(window).add_seconds(block_seconds / num_blocks)
        self.classes[window.octave].rest.add_seconds(rest_seconds / num_blocks)

    def report(self) -> list[dict[str, Any]]:
        """Return what was measured and chosen by class, for `dflash_stats`; plain values."""
        starts = [LEAST_CONTEXT << octave for octave in range(len(self.classes))]
        ends = [*starts[1:], None]  # the last class has all longer contexts
        return [
            {
                "context": [start, end],
                "window": self.tokens[one.in_use],
                "tried": [*self.tokens],
                "accepted": [round(way.acceptance, 3) for way in one.ways],
                "block_ms": [round(1000.0 * way.seconds, 3) for way in one.ways],
                "timed_steps": [way.steps for way in one.ways],
            }
            for start, end, one in zip(starts, ends, self.classes, strict=True)
            if one.rest.steps
        ]

    def _way(self, window: Window) -> Measured:
        return self.classes[window.octave].ways[self.tokens.index(window.tokens)]


def described(report: list[dict[str, Any]]) -> str:
    """Return a report in one line, for the log."""
    parts = []
    for one in report:
        ways = zip(one["tried"], one["accepted"], one["block_ms"], strict=True)
        numbers = "; ".join(
            f"{n or 'all'}: {took:.2f} ms, {came:.2f} + 1" for n, came, took in ways
        )
        start, end = one["context"]
        lengths = f"{start} to {end - 1}" if end else f"{start} and more"
        parts.append(f"{lengths} tokens: {one['window'] or 'all'} ({numbers})")
    return ", ".join(parts)
