"""What a step costs: curves profiled at start-up, corrected by every measured step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.step import Step

LARGEST_SURPRISE = 0.3
"""A measured time counts as at most this much, relatively, off its prediction: a step that was
interrupted, or met a batch size whose kernel had to be built, says nothing about the next."""
CURVE_RATE = 0.05
LEVEL_RATE = 0.15
PROMPT_RATE = 1 / 32
"""Weight of the newest step in how often, and how many, prompt rows share a step."""
MIN_PROMPT_SHARE, LEAST_SHARE = 0.01, 0.1
FAR_SHARE = 0.15
"""Part of a correction that reaches points far from the measured one: a machine that gets slower
gets slower everywhere."""


def repeated(rate: float, times: int) -> float:
    """The rate that goes as far in one correction as `rate` does in several."""
    return 1.0 - (1.0 - rate) ** times


class Curve:
    """Seconds against a count: piecewise linear, non-decreasing, corrected where it is used."""

    def __init__(self, counts: Ints, seconds: Floats) -> None:
        """Start from measured points; counts ascending, at least two."""
        self.counts = np.asarray(counts, dtype=np.float64)
        self.seconds = np.maximum.accumulate(np.asarray(seconds, dtype=np.float64))

    def at(self, counts: Ints | Floats | float) -> Floats:
        """Seconds for each count; beyond the last point the last slope goes on."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.counts[-1] - self.counts[-2])
        beyond = np.maximum(np.asarray(counts) - self.counts[-1], 0.0) * slope
        return np.interp(counts, self.counts, self.seconds) + beyond

    def correct(self, count: float, seconds: float, rate: float = CURVE_RATE) -> None:
        """Move the curve towards a measurement, most near its count."""
        predicted = float(self.at(count))
        if predicted <= 0.0:
            return
        surprise = np.clip(seconds / predicted - 1.0, -LARGEST_SURPRISE, LARGEST_SURPRISE)
        octaves = np.abs(np.log2(np.maximum(self.counts, 0.5) / max(count, 0.5)))
        share = np.maximum(FAR_SHARE, 1.0 - (octaves - octaves.min()))
        self.seconds = np.maximum.accumulate(self.seconds * (1.0 + rate * share * surprise))


class LearnedTime:
    """An additive time by number of requests, learned from nothing; may be negative."""

    def __init__(self, max_requests: int) -> None:
        self.octaves = np.arange(np.ceil(np.log2(max(max_requests, 2))) + 1)
        self.seconds = np.zeros_like(self.octaves)
        self.seen = np.zeros_like(self.octaves)

    def at(self, num_requests: int) -> float:
        """Seconds for that many requests."""
        return float(np.interp(np.log2(num_requests), self.octaves, self.seconds))

    def is_known(self, num_requests: int) -> bool:
        """Whether steps of about that many requests were seen."""
        return bool(self.seen[round(np.log2(num_requests))] > 0)

    def correct(self, num_requests: int, surprise: float, num_steps: int) -> None:
        """Move towards steps that took, in the mean, `surprise` seconds longer than predicted.

        The first measurements count in full, later ones by `LEVEL_RATE`. Numbers of requests that
        were never seen follow their nearest seen neighbour.
        """
        share = np.maximum(0.0, 1.0 - np.abs(self.octaves - np.log2(num_requests)))
        rate = np.maximum(repeated(LEVEL_RATE, num_steps), num_steps / (self.seen + num_steps))
        self.seconds += rate * share * surprise
        self.seen += share * num_steps
        known = np.flatnonzero(self.seen)
        nearest = known[np.abs(known[None] - np.arange(len(self.seen))[:, None]).argmin(axis=1)]
        self.seconds = self.seconds[nearest]


@dataclass(frozen=True)
class StepEstimate:
    """What a step was expected to take, in the parts of a `Step`."""

    target_seconds: float
    draft_seconds: float
    context_seconds: float
    plain_seconds: float
    """What its requests would have taken for one token each without any drafts."""


class StepCosts:
    """Seconds of a step in three parts: everything around the target, draft, context."""

    def __init__(self, verify: Curve, draft: Curve, context: Curve, max_requests: int) -> None:
        """Start from profiled curves.

        Args:
            verify: target's forward against rows.
            draft: drafter's block forward against rows, up to having the tokens.
            context: projecting and storing context against rows.
            max_requests: the largest batch.
        """
        self.verify = verify
        self.draft = draft
        self.context = context
        # What the profile did not see (scheduling, attention over long contexts, sampling)
        # depends on the number of requests; verifying drafts adds to it.
        self.plain_level = LearnedTime(max_requests)
        self.verify_level = LearnedTime(max_requests)
        self.prompt_share = 0.0
        """Part of the steps that hold prompt rows, too."""
        self.prompt_rows = 0.0
        """How many, in those that do."""

    def step(self, num_requests: int, num_tokens: Ints | Floats) -> Floats:
        """Seconds of everything but draft and context, for each number of target rows."""
        level = self.plain_level.at(num_requests)
        extra = self.verify_level.at(num_requests)
        drafted = np.asarray(num_tokens) > num_requests
        # No step is faster than its forward pass, whatever was learned elsewhere.
        forward = self.verify.at(num_tokens)
        return np.maximum(forward + level + extra * drafted, 0.5 * forward)

    def observe_batch(self, prompt_rows: int) -> None:
        """Learn how many rows of a step belonged to prompts."""
        self.prompt_share += PROMPT_RATE * ((prompt_rows > 0) - self.prompt_share)
        if prompt_rows:
            self.prompt_rows += max(PROMPT_RATE, self.prompt_rows == 0) * (
                prompt_rows - self.prompt_rows
            )

    def decoding(self, num_requests: int, num_tokens: Ints | Floats) -> Floats:
        """Seconds that decoding will take of the next step, as far as can be known.

        Prompts have to be read in any case. In a step that they share, reading the weights is
        their cost, and decoding is charged only with what its rows add.
        """
        alone = self.step(num_requests, num_tokens)
        if self.prompt_share < MIN_PROMPT_SHARE:
            return alone
        with_prompts = self.verify.at(np.add(num_tokens, self.prompt_rows))
        added = with_prompts - self.verify.at(self.prompt_rows)
        # A curve that is flat there says only that rows cost less than can be measured.
        shared = np.clip(added, LEAST_SHARE * alone, alone)
        return alone + self.prompt_share * (shared - alone)

    def plain(self, num_requests: int) -> float:
        """Seconds of decoding in a step that verifies nothing; its context can wait."""
        return float(self.decoding(num_requests, np.array(num_requests)))

    def estimate(self, step: Step) -> StepEstimate:
        """What a step that did as much as this one is expected to take."""
        return StepEstimate(
            float(self.step(step.num_requests, np.array(step.rows))),
            float(self.draft.at(step.draft_rows)) if step.draft_rows else 0.0,
            float(self.context.at(step.context_rows)) if step.context_rows else 0.0,
            float(self.step(step.num_requests, np.array(step.num_requests))),
        )

    def observe(self, step: Step) -> StepEstimate:
        """Learn from a measured step of decoding alone; returns what was expected of it."""
        estimate = self.estimate(step)
        predicted = estimate.target_seconds
        bound = LARGEST_SURPRISE * predicted
        surprise = float(np.clip(step.target_seconds - predicted, -bound, bound))
        drafted = step.rows > step.num_requests
        # Until undrafted steps were seen, what surprises is taken to be in those as well.
        plain = not drafted or not self.plain_level.is_known(step.num_requests)
        level = self.plain_level if plain else self.verify_level
        level.correct(step.num_requests, surprise, step.count)
        forward = float(self.verify.at(step.rows))
        self.verify.correct(step.rows, forward + surprise, repeated(CURVE_RATE, step.count))
        if step.draft_rows:
            self.draft.correct(step.draft_rows, step.draft_seconds, LEVEL_RATE)
        if step.context_rows:
            self.context.correct(step.context_rows, step.context_seconds, LEVEL_RATE)
        return estimate
