"""A simulated engine for the planner: costs like those measured on two cores, seeded luck."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_dflash.engine.v1.host_step import FixedLength
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.curves import Curve
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Predicted, StepEstimate, StepRecord

MAX_DRAFT, MOST_FREE = 7, 16
VERIFY_MS = {
    1: 12.0,
    2: 12.8,
    4: 13.9,
    8: 16.9,
    16: 23.0,
    32: 38.0,
    64: 63.0,
    128: 120.0,
    256: 238.0,
}
DRAFT_MS = {2: 1.9, 8: 2.4, 32: 5.0, 64: 7.9, 256: 28.0}
CONTEXT_MS = {1: 0.3, 64: 1.3, 256: 4.7}
PER_REQUEST_MS = 0.3
"""Time the profile does not see."""


def curve(points: dict[int, float]) -> Curve:
    return Curve.of(np.array(list(points)), np.array(list(points.values())) / 1000)


def straight(fixed_ms: float, row_ms: float) -> Curve:
    """Return a curve of `fixed_ms` milliseconds, and `row_ms` more for each row."""
    return curve({0: fixed_ms, 1000: fixed_ms + 1000 * row_ms})


def straight_costs() -> StepCosts:
    """Return costs that are easy to compute by hand: n rows take 10 + n ms to verify, (2 + n) / 4
    to draft, and (4 + n) / 20 to store."""
    return StepCosts.of(straight(10, 1), straight(0.5, 0.25), straight(0.2, 0.05), 64)


def profiled_costs(max_requests: int = 64) -> StepCosts:
    return StepCosts.of(curve(VERIFY_MS), curve(DRAFT_MS), curve(CONTEXT_MS), max_requests)


def step_of(ids: list[str], verified: Ints, accepted: Ints) -> StepRecord:
    """Return a step that only decodes and verified `verified` drafts of each request, [R]."""
    rows = len(ids) + int(np.sum(verified))
    return StepRecord(ids, 1 + np.asarray(accepted), rows, np.asarray(verified))


@dataclass
class World:
    """Requests that never end, drafted by a policy; the world decides times and acceptance.

    Drafts are of two kinds, sure and unsure, like a text's easy and hard stretches; a request
    changes kind with `flip` probability a step. Confidence is the truth to the power `overrated`.
    """

    policy: Planner | FixedLength
    sure: float = 0.93
    unsure: float = 0.45
    flip: float = 0.2
    overrated: float = 1.0
    noise: float = 0.03
    predicts: float = 0.0
    """How often a request's text predicts its next tokens."""
    predicted_truth: float = 0.0
    """Probability that each of those is right if those before it are."""
    hidden_ms: float = 0.0
    """Time of a step that verifies drafts which the profile does not see."""
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._costs = profiled_costs()
        self._rng = np.random.default_rng(self.seed)
        self._texts = np.random.default_rng(self.seed)
        self._is_sure: dict[str, bool] = {}

    def _truth(self, ids: list[str]) -> Floats:
        for name in ids:
            if self._rng.random() < self.flip or name not in self._is_sure:
                self._is_sure[name] = self._rng.random() < 0.5
        rate = np.where([self._is_sure[name] for name in ids], self.sure, self.unsure)
        spread = self._rng.normal(0, 0.05, (len(ids), MAX_DRAFT))
        return np.clip(rate[:, None] + spread, 0.01, 0.99)

    def run(self, ids: list[str], steps: int) -> None:
        """Run some steps with these requests."""
        num = len(ids)
        lengths = np.zeros(num, dtype=int)  # drafts to verify in the coming step
        truth: Floats = np.zeros((num, MAX_DRAFT))
        waiting = np.zeros(num, dtype=int)
        holds_for = 0
        free, from_text = np.zeros(num, dtype=int), np.zeros(num, dtype=bool)
        for _ in range(steps):
            lucky = np.cumprod(self._rng.random((num, MAX_DRAFT)) < truth, axis=1).sum(axis=1)
            came_true = np.zeros(num, dtype=int)
            if self.predicts:
                is_true = self._texts.random((num, MOST_FREE)) < self.predicted_truth
                came_true = np.cumprod(is_true, axis=1).sum(axis=1)
            accepted = np.minimum(np.where(from_text, came_true, lucky), lengths)
            step = step_of(ids, lengths, accepted)
            if self.predicts:
                known = np.minimum(free, step.produced)
                free = MOST_FREE * (self._texts.random(num) < self.predicts)
                matches = self._texts.integers(2, 8, num)
                step.predicted = Predicted(free, matches, known, np.minimum(came_true, known))
            verify = float(self._costs.verify.at(step.rows))
            verify += PER_REQUEST_MS / 1000 * num + bool(lengths.any()) * self.hidden_ms / 1000
            step.target_seconds = verify * (1 + self.noise * self._rng.normal())
            waiting += 1 + accepted
            step.limits, step.waiting = np.full(num, MAX_DRAFT), waiting
            step.is_resting = holds_for > 0
            holds_for -= step.is_resting
            if not step.is_resting:
                step.plan = self.policy.plan(step)
                holds_for = step.plan.holds_for
            elif step.predicted is not None:
                step.plan = self.policy.plan(step)
            truth = self._truth(ids)
            lengths = np.zeros(num, dtype=int)
            plan = step.plan
            if plan.width or plan.uses_text:
                confidence = truth[plan.drafted, : plan.width] ** self.overrated
                lengths, step.from_text = self.policy.decide_lengths(step, confidence)
            from_text = step.from_text
            if plan.width:
                step.draft_rows = int(plan.drafted.sum()) * (1 + plan.width)
                step.draft_seconds = float(self._costs.draft.at(step.draft_rows))
                self.drafted_steps.append(self.steps)
                step.context_rows = int(waiting[plan.drafted].sum())
                waiting[plan.drafted] = 0
                step.context_seconds = float(self._costs.context.at(step.context_rows))
            self.tokens += num + int(accepted.sum())
            self.seconds += step.target_seconds + step.draft_seconds + step.context_seconds
            if not self.steps:
                step.target_seconds = 0.0  # prompts took part, so it is not known
            self.policy.observe(step)
            self.steps += 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def planner() -> Planner:
    return Planner(MAX_DRAFT, 64, profiled_costs(), most_free=MOST_FREE)


def names(count: int, first: int = 0) -> list[str]:
    return [f"request-{number}" for number in range(first, first + count)]


def rate_of(
    policy: Planner | FixedLength, num_requests: int, steps: int = 600, **world: float
) -> float:
    simulated = World(policy, **world)  # type: ignore[arg-type]
    simulated.run(names(num_requests), steps)
    return simulated.rate


class SteadyCosts(StepCosts):
    """Costs that never change, and steps that always took what was expected: decisions repeat."""

    def observe(self, step: StepRecord) -> StepEstimate:
        expected = StepCosts(self.records.copy()).observe(step)
        measured = step.target_seconds, step.draft_seconds, step.context_seconds
        return StepEstimate(*measured, expected.plain_seconds)


def steady_costs(max_requests: int) -> SteadyCosts:
    """Return costs at which drafting pays, for some requests and to some length."""
    draft, context = {2: 1.0, 256: 3.0}, {1: 0.0, 64: 0.5}
    profiled = StepCosts.of(curve(VERIFY_MS), curve(draft), curve(context), max_requests)
    return SteadyCosts(profiled.records)
