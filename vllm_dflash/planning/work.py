"""What a step has to do, and the seconds that it takes by what is known of costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import CURVE, LEVEL, Record, level_at, seconds_at
from vllm_dflash.planning.step import StepEstimate

MIN_PROMPT_SHARE, LEAST_SHARE = 0.01, 0.1


class Attention(NamedTuple):
    """Seconds that attention takes for each token of a context, on top of what rows cost."""

    plain: float = 0.0
    """Of a request that decodes: once a step."""
    draft: float = 0.0
    """Of each draft that is verified behind it."""
    block: float = 0.0
    """Of a block that is drafted."""


NO_ATTENTION = Attention()


class Work(NamedTuple):
    """What a step has to do; rows, and the tokens of context that attention reads for them."""

    num_requests: int
    rows: float
    """Of the target."""
    context: float = 0.0
    """Tokens of context of all requests together."""
    draft_context: float = 0.0
    """Of each verified draft's request, once for every draft."""
    draft_rows: float = 0.0
    """Of blocks that are drafted."""
    block_context: float = 0.0
    """Of the requests that are drafted."""
    context_rows: float = 0.0
    """That are stored."""


class Done(NamedTuple):
    """What `Step` says of a step's work, fields of the same names."""

    rows: int
    context_lens: Ints
    verified: Ints
    draft_rows: int
    drafted: Bools
    context_rows: int


@compiled
def work_of(done: Done) -> Work:
    """A step's, summed over its requests."""
    rows, context_lens, verified, draft_rows, drafted, context_rows = done
    context = draft_context = block_context = 0.0
    for request in range(len(context_lens)):
        context += context_lens[request]
        draft_context += context_lens[request] * verified[request]
        if draft_rows and request < len(drafted) and drafted[request]:
            block_context += context_lens[request]
    return Work(
        len(context_lens),
        float(rows),
        context,
        draft_context,
        float(draft_rows),
        block_context,
        float(context_rows),
    )


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


@compiled
def level_of(costs: Record, num_requests: int, drafted: bool) -> float:
    """What a step takes beyond its forward pass."""
    level = level_at(costs.plain_level, num_requests)
    return level + level_at(costs.verify_level, num_requests) if drafted else level


@compiled
def leveled_seconds(costs: Record, work: Work, level: float) -> float:
    """Seconds of everything but draft and context, of a step with this level."""
    forward = seconds_at(costs.verify, work.rows)
    forward += costs.attention[0] * work.context + costs.attention[1] * work.draft_context
    # No step is faster than its forward pass, whatever was learned elsewhere.
    return max(forward + level, 0.5 * forward)


@compiled
def target_seconds(costs: Record, work: Work) -> float:
    """Seconds of everything but draft and context."""
    level = level_of(costs, work.num_requests, work.rows > work.num_requests)
    return leveled_seconds(costs, work, level)


@compiled
def decoding_seconds(costs: Record, work: Work, level: float) -> float:
    """Seconds that decoding will take of the next step, as far as can be known.

    Prompts have to be read in any case. In a step that they share, reading the weights is
    their cost, and decoding is charged only with what its rows add.
    """
    alone = leveled_seconds(costs, work, level)
    share, prompt_rows = costs.prompt_share, costs.prompt_rows
    if share < MIN_PROMPT_SHARE:
        return alone
    added = seconds_at(costs.verify, work.rows + prompt_rows)
    added -= seconds_at(costs.verify, prompt_rows)
    added += costs.attention[0] * work.context + costs.attention[1] * work.draft_context
    # A curve that is flat there says only that rows cost less than can be measured.
    shared = min(max(added, LEAST_SHARE * alone), alone)
    return alone + share * (shared - alone)


@compiled
def plain_seconds(costs: Record, num_requests: int, context: float) -> float:
    """Seconds of decoding in a step that verifies nothing; its context can wait."""
    work = Work(num_requests, float(num_requests), context, 0.0, 0.0, 0.0, 0.0)
    return decoding_seconds(costs, work, level_of(costs, num_requests, False))


@compiled
def block_seconds(costs: Record, rows: float, context: float) -> float:
    """Seconds of drafting blocks of so many rows, whose requests have so many tokens of context."""
    return seconds_at(costs.draft, rows) + costs.attention[2] * context if rows else 0.0


@compiled
def many_decoding_seconds(
    costs: Record, num_requests: int, rows: Floats, context: float, mean_context: float
) -> Floats:
    """`decoding_seconds` for each number of rows, [N]; drafts stand behind a mean context."""
    seconds = np.empty(len(rows))
    plain_level = level_of(costs, num_requests, False)
    level = level_of(costs, num_requests, True)
    for number in range(len(rows)):
        drafts = rows[number] - num_requests
        work = Work(num_requests, rows[number], context, drafts * mean_context, 0.0, 0.0, 0.0)
        seconds[number] = decoding_seconds(costs, work, level if drafts > 0 else plain_level)
    return seconds


@compiled
def estimate_of(costs: Record, work: Work) -> StepEstimate:
    """What a step of so much work is expected to take."""
    plain = Work(work.num_requests, float(work.num_requests), work.context, 0.0, 0.0, 0.0, 0.0)
    return StepEstimate(
        target_seconds(costs, work),
        block_seconds(costs, work.draft_rows, work.block_context),
        seconds_at(costs.context, work.context_rows) if work.context_rows else 0.0,
        target_seconds(costs, plain),
    )
