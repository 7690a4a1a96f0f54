"""A simulated engine for the planner: costs like those measured on two cores, seeded luck."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm_dflash.planning import Floats
from vllm_dflash.planning.costs import Curve, StepCosts, StepEstimate, StepTimes
from vllm_dflash.planning.fixed_length import FixedLength
from vllm_dflash.planning.length_policy import LengthPolicy
from vllm_dflash.planning.planner import Plan, Planner

MAX_DRAFT = 7
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
NOBODY = Plan(np.zeros(0, dtype=bool), width=0, price=0.0, speedup=1.0)
PER_REQUEST_MS = 0.3
"""Time the profile does not see."""


def curve(points: dict[int, float]) -> Curve:
    return Curve(np.array(list(points)), np.array(list(points.values())) / 1000)


def profiled_costs(max_requests: int = 64) -> StepCosts:
    return StepCosts(curve(VERIFY_MS), curve(DRAFT_MS), curve(CONTEXT_MS), max_requests)


@dataclass
class World:
    """Requests that never end, drafted by a policy; times and luck are the world's.

    Drafts come in two kinds, sure and unsure, as a text's easy and hard stretches do; a request
    changes kind with `flip` probability a step. Confidence is the truth to the power `overrated`.
    """

    policy: LengthPolicy
    sure: float = 0.93
    unsure: float = 0.45
    flip: float = 0.2
    overrated: float = 1.0
    noise: float = 0.03
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted_steps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._costs = profiled_costs()
        self._rng = np.random.default_rng(self.seed)
        self._is_sure: dict[str, bool] = {}

    def _truth(self, ids: list[str]) -> Floats:
        for name in ids:
            if self._rng.random() < self.flip or name not in self._is_sure:
                self._is_sure[name] = self._rng.random() < 0.5
        rate = np.where([self._is_sure[name] for name in ids], self.sure, self.unsure)
        spread = self._rng.normal(0, 0.05, (len(ids), MAX_DRAFT))
        return np.clip(rate[:, None] + spread, 0.01, 0.99)

    def run(self, ids: list[str], steps: int) -> None:
        """Go on for some steps with these requests."""
        num = len(ids)
        room = np.full(num, MAX_DRAFT)
        waiting = np.zeros(num, dtype=int)  # drafts to verify in the coming step
        truth = np.zeros((num, MAX_DRAFT))
        pending = np.zeros(num, dtype=int)
        rest = 0
        for _ in range(steps):
            lucky = np.cumprod(self._rng.random((num, MAX_DRAFT)) < truth, axis=1).sum(axis=1)
            accepted = np.minimum(lucky, waiting)
            verify = float(self._costs.verify.at(num + waiting.sum()))
            verify += PER_REQUEST_MS / 1000 * num
            verify *= 1 + self.noise * self._rng.normal()
            if waiting.any():
                self.policy.observe_verification(ids, waiting, accepted)
            pending += 1 + accepted
            if rest:
                rest -= 1
                plan = NOBODY
            else:
                plan = self.policy.plan(ids, room, pending)
                rest = plan.rest
            truth = self._truth(ids)
            draft = context = 0.0
            rows = stored = 0
            verified = num + int(waiting.sum())
            waiting = np.zeros(num, dtype=int)
            if plan.width:
                rows = int(plan.drafted.sum()) * (1 + plan.width)
                draft = float(self._costs.draft.at(rows))
                confidence = truth[plan.drafted, : plan.width] ** self.overrated
                waiting[plan.drafted] = self.policy.lengths(plan, ids, room, confidence)
                self.drafted_steps.append(self.steps)
                stored = int(pending[plan.drafted].sum())
                pending[plan.drafted] = 0
                context = float(self._costs.context.at(stored))
            self.policy.observe_step(StepTimes(num, verified, verify, rows, draft, stored, context))
            self.tokens += num + int(accepted.sum())
            self.seconds += verify + draft + context
            self.steps += 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def planner(max_requests: int = 64) -> Planner:
    return Planner(MAX_DRAFT, max_requests, profiled_costs(max_requests))


def names(count: int, first: int = 0) -> list[str]:
    return [f"request-{number}" for number in range(first, first + count)]


class Undrafted(FixedLength):
    """Plain decoding."""

    def __init__(self) -> None:
        super().__init__(0)


def rate_of(policy: LengthPolicy, num_requests: int, steps: int = 600, **world: float) -> float:
    simulated = World(policy, **world)  # type: ignore[arg-type]
    simulated.run(names(num_requests), steps)
    return simulated.rate


class SteadyCosts(StepCosts):
    """Costs that stay what they are however long the machine takes, so decisions repeat."""

    def observe(self, times: StepTimes) -> StepEstimate:
        return self.estimate(times)


def steady_costs(max_requests: int) -> SteadyCosts:
    """Drafting pays, for some requests and to some length."""
    draft, context = {2: 1.0, 256: 3.0}, {1: 0.0, 64: 0.5}
    return SteadyCosts(curve(VERIFY_MS), curve(draft), curve(context), max_requests)
