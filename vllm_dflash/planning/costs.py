"""What a step costs: curves profiled at start-up, corrected by every measured step.

The target's seconds are a curve over its rows, plus what attention reads of contexts, plus a level
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
from vllm_dflash.planning.step import StepEstimate, StepRecord, Work

CURVE_RATE, LEVEL_RATE = 0.05, 0.15
LEVEL_NOISE = 0.03
"""Share of a step without drafts by which one with drafts may seem to be faster."""
FAR_BELOW = 0.5
"""Share of its expected time below which a block shows that the profile was wrong, as on a machine
that was busy then. Its time counts in full."""
MIN_PROMPT_SHARE, LEAST_SHARE = 0.01, 0.1
PROMPT_RATE = 1 / 32
"""Weight of the newest step in how often prompt rows share a step, and in how many they are."""
FAR_CONTEXT = 8192
"""Tokens of context per request from which attention explains most of a surprising time."""
ATTENTION_RATE = 0.15

MOST_OCTAVES = 24
LEVEL = np.dtype(
    [("num_points", "i8"), ("seconds", "f8", (MOST_OCTAVES,)), ("seen", "f8", (MOST_OCTAVES,))]
)
"""Seconds at 1, 2, 4, ... requests (may be negative), and how many steps were seen there."""
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
"""All that is known about costs; see `StepCosts`."""


class Attention(NamedTuple):
    """Seconds that attention takes per token of context, on top of what rows cost."""

    plain: float = 0.0
    """Per token of context of a request that decodes, once a step."""
    draft: float = 0.0
    """The same, for each draft that is verified."""
    block: float = 0.0
    """The same, for a block that is drafted."""


NO_ATTENTION = Attention()


@compiled
def correct_level(level: Record, num_requests: int, surprise: float, num_steps: int) -> None:
    """Move the level towards steps that took `surprise` seconds longer than predicted on average.

    The first measurements count in full, later ones by `LEVEL_RATE`. Request counts that were never
    seen follow the nearest seen one; of two equally near, the smaller.
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
    """Return the seconds of a step without drafting and storing context.

    Args:
        costs: costs of steps.
        num_requests: R.
        rows: rows of the target: one for each request, plus the drafts to verify.
        context: tokens of context of all requests.
        reading: tokens of context before each draft, summed.
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
    # No step takes less than half its forward pass, whatever was learned elsewhere.
    return max(forward + level, 0.5 * forward)


@compiled
def decoding_seconds(
    records: Records, num_requests: int, context: float, rows: Floats, reading: Floats
) -> Floats:
    """Return the seconds that decoding takes in each of N steps, as far as can be known.

    Prompts have to be read in any case. In a step shared with prompts, reading the weights is
    their cost, and decoding is charged only for what its rows add.

    Args:
        records: costs, [1].
        num_requests: R, the same in all steps.
        context: tokens of context of these requests.
        rows: as in `target_seconds`, [N].
        reading: as in `target_seconds`, [N].
    """
    costs, seconds = records[0], np.empty(len(rows))
    share, prompt_rows = costs.prompt_share, costs.prompt_rows
    of_prompts = seconds_at(costs.verify, prompt_rows)
    for number in range(len(rows)):
        alone = target_seconds(costs, num_requests, rows[number], context, reading[number])
        seconds[number] = alone
        if share >= MIN_PROMPT_SHARE:
            added = seconds_at(costs.verify, rows[number] + prompt_rows) - of_prompts
            added += costs.attention[0] * context + costs.attention[1] * reading[number]
            # A flat curve there says only that rows cost less than can be measured.
            shared = min(max(added, LEAST_SHARE * alone), alone)
            seconds[number] += share * (shared - alone)
    return seconds


@compiled
def block_seconds(costs: Record, rows: float, context: float) -> float:
    """Return the seconds of drafting blocks with `rows` rows and `context` tokens of context."""
    return seconds_at(costs.draft, rows) + costs.attention[2] * context if rows else 0.0


@compiled
def learn_plain(costs: Record, num_requests: int, surprise: float, num_steps: int) -> None:
    """Correct the plain level.

    As long as steps without drafts were not seen, it is a guess, and the verify level holds what
    was seen beyond it. So where both change, their sum must not.
    """
    plain, verify = costs.plain_level, costs.verify_level
    before, seen = plain.seconds.copy(), plain.seen.copy()
    correct_level(plain, num_requests, surprise, num_steps)
    for point in range(plain.num_points):
        if seen[point] == 0.0 and verify.seen[point] > 0.0:
            verify.seconds[point] -= plain.seconds[point] - before[point]


@compiled
def learn_verify(
    costs: Record, num_requests: int, surprise: float, num_steps: int, slack: float
) -> None:
    """Correct the verify level.

    Drafts make no step faster. If a step with drafts seems to, although its rows and reading take
    `slack` seconds more, steps without drafts were measured while the machine was slower: their
    level is lowered. They would not be measured again soon, as drafting seems to pay.
    """
    plain, verify, octave = costs.plain_level, costs.verify_level, np.log2(num_requests)
    correct_level(verify, num_requests, surprise, num_steps)
    for point in range(verify.num_points):
        below = verify.seconds[point] + slack
        if below < 0.0 and abs(point - octave) < 1.0:
            plain.seconds[point] += below
            verify.seconds[point] -= below


@compiled
def learn_costs(records: Records, work: Work) -> StepEstimate:
    """Learn from a step, or from the mean of several that were alike; `records`: costs, [1].

    Returns what was expected of it.
    """
    costs, attention, count = records[0], records[0].attention, work.num_requests
    context, reading = work.context, work.draft_context
    expected = target_seconds(costs, count, work.rows, context, reading)
    drafting = block_seconds(costs, work.draft_rows, work.block_context)
    storing = seconds_at(costs.context, work.context_rows) if work.context_rows else 0.0
    plain = target_seconds(costs, count, float(count), context, 0.0)
    forward = seconds_at(costs.verify, work.rows)
    # Much makes a step slow, but nothing far faster than it can be: a low measurement counts in
    # full, down to the least that a step is taken to need.
    reads = attention[0] * context + attention[1] * reading
    least = 0.5 * (forward + reads)
    measured = max(work.target_seconds, least)
    surprise = min(measured - expected, LARGEST_SURPRISE * expected)
    # The longer the contexts are, the more of the surprise is attributed to attention.
    far = (context / (count * FAR_CONTEXT)) ** 2
    draft_far = (reading / (count * FAR_CONTEXT)) ** 2
    parts = 1.0 + far + draft_far
    change = ATTENTION_RATE * surprise / parts  # `far` is 0 where nothing is read
    attention[0] = max(attention[0] + change * far / max(context, 1.0), 0.0)
    attention[1] = max(attention[1] + change * draft_far / max(reading, 1.0), 0.0)
    surprise /= parts
    if work.rows > count:
        slack = LEVEL_NOISE * plain + work.inferred_seconds + attention[1] * reading
        slack += forward - seconds_at(costs.verify, count)
        learn_verify(costs, count, surprise, work.num_steps, slack)
    else:
        learn_plain(costs, count, surprise, work.num_steps)
    rate = 1.0 - (1.0 - CURVE_RATE) ** work.num_steps  # as much as `num_steps` corrections
    correct_curve(costs.verify, work.rows, forward + surprise, rate)
    if work.draft_rows:
        curve = seconds_at(costs.draft, work.draft_rows)
        bound = LARGEST_SURPRISE * drafting
        surprise = min(work.draft_seconds - drafting, bound)
        is_wrong = work.draft_seconds < FAR_BELOW * drafting
        far = (work.block_context / (max(work.num_blocks, 1) * FAR_CONTEXT)) ** 2
        change = ATTENTION_RATE * surprise * far / (1.0 + far)
        attention[2] = max(attention[2] + change / max(work.block_context, 1.0), 0.0)
        rate = 1.0 if is_wrong else LEVEL_RATE
        correct_curve(costs.draft, work.draft_rows, curve + surprise / (1.0 + far), rate)
    if work.context_rows:
        correct_curve(costs.context, work.context_rows, work.context_seconds, LEVEL_RATE)
    return StepEstimate(expected, drafting, storing, plain)


def num_octaves(max_requests: int) -> int:
    """Return the number of points of a level: 1, 2, 4, ... requests."""
    return int(np.ceil(np.log2(max(max_requests, 2)))) + 1


class StepCosts:
    """Seconds of a step in three parts: everything around the target, drafting, storing context."""

    def __init__(self, records: Records) -> None:
        """Use the costs in `records`, an array of one."""
        self.records = records

    @classmethod
    def of(
        cls,
        verify: Curve,
        draft: Curve,
        context: Curve,
        max_requests: int,
        attention: Attention = NO_ATTENTION,
    ) -> StepCosts:
        """Start from profiled curves.

        Args:
            verify: target's forward against rows, with hardly any context.
            draft: drafter's block forward against rows, until its tokens are known.
            context: projecting and storing context against rows.
            max_requests: the largest batch.
            attention: what tokens of context add.
        """
        records = np.zeros(1, COSTS)
        for name, curve in (("verify", verify), ("draft", draft), ("context", context)):
            records[name] = curve.records
        # What the profile did not see depends on the number of requests; verifying adds to it.
        for name in ("plain_level", "verify_level"):
            records[name]["num_points"] = num_octaves(max_requests)
        records["attention"] = attention
        return cls(records)

    @property
    def verify(self) -> Curve:
        """Target's forward against rows."""
        return Curve(self.records["verify"])

    @property
    def draft(self) -> Curve:
        """Drafter's block forward against rows."""
        return Curve(self.records["draft"])

    @property
    def context(self) -> Curve:
        """Storing context against rows."""
        return Curve(self.records["context"])

    @property
    def attention(self) -> Attention:
        """What tokens of context add."""
        return Attention(*self.records["attention"][0].tolist())

    def decoding(
        self,
        num_requests: int,
        rows: Ints | Floats,
        context: float = 0.0,
        reading: Floats | float = 0.0,
    ) -> Floats:
        """Return the seconds that decoding takes in the next step, [N]; see `decoding_seconds`."""
        rows = np.asarray(rows, np.float64)
        read = np.zeros(len(rows)) + reading
        return decoding_seconds(self.records, num_requests, float(context), rows, read)

    def plain(self, num_requests: int, context: float = 0.0) -> float:
        """Return the seconds of a step that verifies nothing; storing its context can wait."""
        return float(self.decoding(num_requests, np.array([num_requests]), context)[0])

    def block(self, rows: float, context: float = 0.0) -> float:
        """Return the seconds of drafting blocks with `rows` rows."""
        return block_seconds(self.records[0], float(rows), float(context))

    def observe(self, step: StepRecord) -> StepEstimate:
        """Learn from a measured step that only decoded. Returns what was expected of it."""
        return learn_costs(self.records, step.work())

    def observe_batch(self, prompt_rows: int) -> None:
        """Learn how many rows of a step belonged to prompts."""
        share, rows = self.records["prompt_share"], self.records["prompt_rows"]
        share += PROMPT_RATE * ((prompt_rows > 0) - share)
        if prompt_rows:
            rows += (PROMPT_RATE if rows[0] else 1.0) * (prompt_rows - rows)
