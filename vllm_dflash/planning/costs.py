"""What a step costs: curves profiled at start-up, corrected by every measured step."""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.curves import (
    CURVE_RATE,
    LARGEST_SURPRISE,
    LEVEL_RATE,
    Curve,
    LearnedTime,
    correct_curve,
    correct_level,
    is_level_known,
    repeated,
    seconds_at,
)
from vllm_dflash.planning.step import Step, StepEstimate
from vllm_dflash.planning.work import (
    COSTS,
    NO_ATTENTION,
    Attention,
    Done,
    block_seconds,
    estimate_of,
    many_decoding_seconds,
    plain_seconds,
    work_of,
)

PROMPT_RATE = 1 / 32
"""Weight of the newest step in how often, and how many, prompt rows share a step."""
FAR_CONTEXT = 8192
"""Tokens of context of a request from which on attention explains most of a surprising time."""
ATTENTION_RATE = 0.15


@compiled
def learn_costs(
    records: Records, done: Done, target: float, drafting: float, storing: float, count: int
) -> StepEstimate:
    """Learn from `count` alike steps and their mean seconds; returns what was expected of them.

    Args:
        records: costs, [1].
        done: in each of those steps.
        target: seconds of everything but draft and context.
        drafting: of the draft.
        storing: of the context.
        count: how many they were.
    """
    costs, attention = records[0], records[0].attention
    work = work_of(done)
    estimate = estimate_of(costs, work)
    predicted = estimate.target_seconds
    bound = LARGEST_SURPRISE * predicted
    surprise = min(max(target - predicted, -bound), bound)
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
    has_drafts = work.rows > work.num_requests
    # Until undrafted steps were seen, what surprises is taken to be in those as well.
    if has_drafts and is_level_known(costs.plain_level, work.num_requests):
        correct_level(costs.verify_level, work.num_requests, surprise, count)
    else:
        correct_level(costs.plain_level, work.num_requests, surprise, count)
    forward = seconds_at(costs.verify, work.rows)
    correct_curve(costs.verify, work.rows, forward + surprise, repeated(CURVE_RATE, count))
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


@compiled
def learn_prompts(records: Records, prompt_rows: int) -> None:
    """Learn how many rows of a step belonged to prompts."""
    costs = records[0]
    costs.prompt_share += PROMPT_RATE * ((prompt_rows > 0) - costs.prompt_share)
    if prompt_rows:
        rate = 1.0 if costs.prompt_rows == 0 else PROMPT_RATE
        costs.prompt_rows += rate * (prompt_rows - costs.prompt_rows)


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
        # What the profile did not see (scheduling, sampling) depends on the number of requests;
        # verifying drafts adds to it.
        for name in ("plain_level", "verify_level"):
            self.records[name] = LearnedTime(max_requests).records
        self.records["attention"] = attention

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
    def plain_level(self) -> LearnedTime:
        """What a step takes beyond its forward pass, against requests."""
        return LearnedTime.of(self.records["plain_level"])

    @property
    def verify_level(self) -> LearnedTime:
        """What is added to that where drafts are verified."""
        return LearnedTime.of(self.records["verify_level"])

    @property
    def attention(self) -> Attention:
        """What tokens of context add."""
        return Attention(*self.records["attention"][0].tolist())

    def observe_batch(self, prompt_rows: int) -> None:
        """Learn how many rows of a step belonged to prompts."""
        learn_prompts(self.records, prompt_rows)

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
        return plain_seconds(self.records[0], num_requests, float(context))

    def block(self, rows: float, context: float = 0.0) -> float:
        """Seconds of drafting blocks of so many rows."""
        return block_seconds(self.records[0], float(rows), float(context))

    def estimate(self, step: Step) -> StepEstimate:
        """What a step that did as much as this one is expected to take."""
        return estimate_of(self.records[0], work_of(_done_in(step)))

    def observe(self, step: Step) -> StepEstimate:
        """Learn from a measured step of decoding alone; returns what was expected of it."""
        seconds = step.target_seconds, step.draft_seconds, step.context_seconds
        return learn_costs(self.records, _done_in(step), *seconds, step.count)


def _done_in(step: Step) -> Done:
    lens, verified, drafted = step.context_lens, step.verified, step.plan.drafted
    return Done(step.rows, lens, verified, step.draft_rows, drafted, step.context_rows)
