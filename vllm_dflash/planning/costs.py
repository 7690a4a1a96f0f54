"""What a step costs: curves profiled at start-up, corrected by every measured step.

Seconds of the target are a curve against its rows, what attention reads of contexts, and a level
that depends on the number of requests (scheduling, sampling), which no profile sees. Drafting and
storing context are a curve each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import (
    CURVE,
    LARGEST_SURPRISE,
    Curve,
    Record,
    correct_curve,
    seconds_at,
)
from vllm_dflash.planning.step import Step, StepEstimate, Work

CURVE_RATE, LEVEL_RATE = 0.05, 0.15
MIN_PROMPT_SHARE, LEAST_SHARE = 0.01, 0.1
PROMPT_RATE = 1 / 32
"""Weight of the newest step in how often, and how many, prompt rows share a step."""
FAR_CONTEXT = 8192
"""Tokens of context of a request from which on attention explains most of a surprising time."""
ATTENTION_RATE = 0.15

MOST_OCTAVES = 24
LEVEL = np.dtype(
    [("num_points", "i8"), ("seconds", "f8", (MOST_OCTAVES,)), ("seen", "f8", (MOST_OCTAVES,))]
)
"""Seconds at 1, 2, 4, ... requests, and how many steps were seen there; may be negative."""
COSTS = np.dtype(
    [
        ("verify", CURVE),
        ("draft", CURVE),
        ("context", CURVE),
        ("plain_level", LEVEL),
        ("verify_level", LEVEL),
        ("attention", "f8", (3,)),
        ("prompt_share", "f8"),
        ("prompt_rows", "f8"),
    ]
)
"""All that is known; see `StepCosts`."""


class Attention(NamedTuple):
    """Seconds that attention takes for each token of a context, on top of what rows cost."""

    plain: float = 0.0
    """Of a request that decodes: once a step."""
    draft: float = 0.0
    """Of each draft that is verified behind it."""
    block: float = 0.0
    """Of a block that is drafted."""


NO_ATTENTION = Attention()


@compiled
def correct_level(level: Record, num_requests: int, surprise: float, num_steps: int) -> None:
    """Move towards steps that took, in the mean, `surprise` seconds longer than predicted.

    The first measurements count in full, later ones by `LEVEL_RATE`. Numbers of requests that
    were never seen follow their nearest seen neighbour, of two the smaller one.
    """
    octave = np.log2(num_requests)
    steady = 1.0 - (1.0 - LEVEL_RATE) ** num_steps
    for point in range(level.num_points):
        share = max(0.0, 1.0 - abs(point - octave))
        rate = max(steady, num_steps / (level.seen[point] + num_steps))
        level.seconds[point] += rate * share * surprise
        level.seen[point] += share * num_steps
    for point in range(level.num_points):
        nearest, octaves = point, np.inf
        for known in range(level.num_points):
            if level.seen[known] > 0 and abs(known - point) < octaves:
                nearest, octaves = known, abs(known - point)
        level.seconds[point] = level.seconds[nearest]


@compiled
def target_seconds(
    costs: Record, num_requests: int, rows: float, context: float, reading: float
) -> float:
    """Seconds of everything but draft and context of a step.

    Args:
        costs: of steps.
        num_requests: R.
        rows: of the target: one for each request, and the drafts to verify.
        context: tokens of context of all requests.
        reading: tokens of context before each draft, summed up.
    """
    plain, verify = costs.plain_level, costs.verify_level
    octave = min(np.log2(num_requests), plain.num_points - 1.0)
    lower = min(int(octave), plain.num_points - 2)
    share = octave - lower
    level = plain.seconds[lower] + share * (plain.seconds[lower + 1] - plain.seconds[lower])
    if rows > num_requests:
        more = verify.seconds[lower + 1] - verify.seconds[lower]
        level += verify.seconds[lower] + share * more
    forward = seconds_at(costs.verify, rows)
    forward += costs.attention[0] * context + costs.attention[1] * reading
    # No step is faster than its forward pass, whatever was learned elsewhere.
    return max(forward + level, 0.5 * forward)


@compiled
def decoding_seconds(
    costs: Record, num_requests: int, rows: float, context: float, reading: float
) -> float:
    """Seconds that decoding will take of the next step, as far as can be known; arguments as of
    `target_seconds`.

    Prompts have to be read in any case. In a step that they share, reading the weights is
    their cost, and decoding is charged only with what its rows add.
    """
    alone = target_seconds(costs, num_requests, rows, context, reading)
    share, prompt_rows = costs.prompt_share, costs.prompt_rows
    if share < MIN_PROMPT_SHARE:
        return alone
    added = seconds_at(costs.verify, rows + prompt_rows)
    added -= seconds_at(costs.verify, prompt_rows)
    added += costs.attention[0] * context + costs.attention[1] * reading
    # A curve that is flat there says only that rows cost less than can be measured.
    shared = min(max(added, LEAST_SHARE * alone), alone)
    return alone + share * (shared - alone)


@compiled
def many_decoding_seconds(
    costs: Record, num_requests: int, rows: Floats, context: float, mean_context: float
) -> Floats:
    """`decoding_seconds` for each number of rows, [N]; drafts stand behind a mean context."""
    seconds = np.empty(len(rows))
    for number in range(len(rows)):
        reading = (rows[number] - num_requests) * mean_context
        seconds[number] = decoding_seconds(costs, num_requests, rows[number], context, reading)
    return seconds


@compiled
def block_seconds(costs: Record, rows: float, context: float) -> float:
    """Seconds of drafting blocks of so many rows, whose requests have so many tokens of context."""
    return seconds_at(costs.draft, rows) + costs.attention[2] * context if rows else 0.0


@compiled
def estimate_of(costs: Record, work: Work) -> StepEstimate:
    """What a step of so much work is expected to take."""
    count, context = work.num_requests, work.context
    return StepEstimate(
        target_seconds(costs, count, work.rows, context, work.draft_context),
        block_seconds(costs, work.draft_rows, work.block_context),
        seconds_at(costs.context, work.context_rows) if work.context_rows else 0.0,
        target_seconds(costs, count, float(count), context, 0.0),
    )


@compiled
def learn_costs(
    records: Records, work: Work, target: float, drafting: float, storing: float, steps: int
) -> StepEstimate:
    """Learn from alike steps of so much work each, and their mean seconds in three parts.

    Returns what was expected of them.
    """
    costs, attention = records[0], records[0].attention
    estimate = estimate_of(costs, work)
    bound = LARGEST_SURPRISE * estimate.target_seconds
    surprise = min(max(target - estimate.target_seconds, -bound), bound)
    # The longer the contexts are, the more of what surprises is taken to be attention's.
    far = (work.context / (work.num_requests * FAR_CONTEXT)) ** 2
    draft_far = (work.draft_context / (work.num_requests * FAR_CONTEXT)) ** 2
    parts = 1.0 + far + draft_far
    if work.context:
        change = ATTENTION_RATE * surprise * far / parts / work.context
        attention[0] = max(attention[0] + change, 0.0)
    if work.draft_context:
        change = ATTENTION_RATE * surprise * draft_far / parts / work.draft_context
        attention[1] = max(attention[1] + change, 0.0)
    surprise /= parts
    # Until undrafted steps were seen, what surprises is taken to be in those as well.
    is_plain_known = costs.plain_level.seen[round(np.log2(work.num_requests))] > 0
    if work.rows > work.num_requests and is_plain_known:
        correct_level(costs.verify_level, work.num_requests, surprise, steps)
    else:
        correct_level(costs.plain_level, work.num_requests, surprise, steps)
    forward = seconds_at(costs.verify, work.rows)
    rate = 1.0 - (1.0 - CURVE_RATE) ** steps  # goes as far as so many corrections, one by one
    correct_curve(costs.verify, work.rows, forward + surprise, rate)
    if work.draft_rows:
        curve = seconds_at(costs.draft, work.draft_rows)
        bound = LARGEST_SURPRISE * estimate.draft_seconds
        surprise = min(max(drafting - estimate.draft_seconds, -bound), bound)
        far = (work.block_context / (work.num_requests * FAR_CONTEXT)) ** 2
        if work.block_context:
            change = ATTENTION_RATE * surprise * far / (1.0 + far) / work.block_context
            attention[2] = max(attention[2] + change, 0.0)
        correct_curve(costs.draft, work.draft_rows, curve + surprise / (1.0 + far), LEVEL_RATE)
    if work.context_rows:
        correct_curve(costs.context, work.context_rows, storing, LEVEL_RATE)
    return estimate


def num_octaves(max_requests: int) -> int:
    """Points of a level: 1, 2, 4, ... requests."""
    return int(np.ceil(np.log2(max(max_requests, 2)))) + 1


class StepCosts:
    """Seconds of a step in three parts: everything around the target, draft, context."""

    def __init__(
        self,
        verify: Curve,
        draft: Curve,
        context: Curve,
        max_requests: int,
        attention: Attention = NO_ATTENTION,
    ) -> None:
        """Start from profiled curves.

        Args:
            verify: target's forward against rows, with hardly any context.
            draft: drafter's block forward against rows, up to having the tokens.
            context: projecting and storing context against rows.
            max_requests: the largest batch.
            attention: what tokens of context add.
        """
        self.records = np.zeros(1, COSTS)
        for name, curve in (("verify", verify), ("draft", draft), ("context", context)):
            self.records[name] = curve.records
        # What the profile did not see depends on the number of requests; verifying adds to it.
        for name in ("plain_level", "verify_level"):
            self.records[name]["num_points"] = num_octaves(max_requests)
        self.records["attention"] = attention

    @classmethod
    def of(cls, records: Records) -> StepCosts:
        """Those in an array of one."""
        costs = cls.__new__(cls)
        costs.records = records
        return costs

    @property
    def verify(self) -> Curve:
        """Target's forward against rows."""
        return Curve.of(self.records["verify"])

    @property
    def draft(self) -> Curve:
        """Drafter's block forward against rows."""
        return Curve.of(self.records["draft"])

    @property
    def context(self) -> Curve:
        """Storing context against rows."""
        return Curve.of(self.records["context"])

    @property
    def attention(self) -> Attention:
        """What tokens of context add."""
        return Attention(*self.records["attention"][0].tolist())

    def decoding(
        self,
        num_requests: int,
        num_rows: Ints | Floats,
        context: float = 0.0,
        mean_context: float = 0.0,
    ) -> Floats:
        """Seconds that decoding will take of the next step, for each number of target rows, [N].

        Args:
            num_requests: R.
            num_rows: one for each request, and the drafts to verify.
            context: tokens of context of all requests.
            mean_context: of a request whose drafts are verified.
        """
        rows = np.asarray(num_rows, dtype=np.float64)
        return many_decoding_seconds(self.records[0], num_requests, rows, context, mean_context)

    def plain(self, num_requests: int, context: float = 0.0) -> float:
        """Seconds of decoding in a step that verifies nothing; its context can wait."""
        rows, context = float(num_requests), float(context)
        return decoding_seconds(self.records[0], num_requests, rows, context, 0.0)

    def block(self, rows: float, context: float = 0.0) -> float:
        """Seconds of drafting blocks of so many rows."""
        return block_seconds(self.records[0], float(rows), float(context))

    def estimate(self, step: Step) -> StepEstimate:
        """What a step that did as much as this one is expected to take."""
        return estimate_of(self.records[0], step.work())

    def observe(self, step: Step) -> StepEstimate:
        """Learn from a measured step of decoding alone; returns what was expected of it."""
        seconds = step.target_seconds, step.draft_seconds, step.context_seconds
        return learn_costs(self.records, step.work(), *seconds, step.count)

    def observe_batch(self, prompt_rows: int) -> None:
        """Learn how many rows of a step belonged to prompts."""
        share, rows = self.records["prompt_share"], self.records["prompt_rows"]
        share += PROMPT_RATE * ((prompt_rows > 0) - share)
        if prompt_rows:
            rows += (PROMPT_RATE if rows[0] else 1.0) * (prompt_rows - rows)
