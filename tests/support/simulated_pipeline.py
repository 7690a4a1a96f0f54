"""vLLM's asynchronous engine as a pipeline in time, without vLLM: the oracle for what is learned.

The scheduler hands step n + 1 to the device while step n runs. The device works in order: the
target's forward, then the output of that step is sent off, then the drafter's block, if the step
drafts. So the time between two outputs holds the block of the step before. Drafts are verified one
step after they were made, and what came of them is known when that step's output is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from support.fake_time import FakeTime
from support.planner_world import curve
from vllm_dflash.planning.curves import Curve

GPU_VERIFY = {1: 6.0, 64: 6.3, 256: 8.5, 512: 13.5, 4096: 100.0}
GPU_DRAFT = {1: 0.9, 64: 1.0, 256: 1.4, 512: 2.2, 4096: 16.0}
"""Milliseconds by rows: the shape of an 8B target and its drafter on one datacentre GPU; assumed,
not measured."""


class Scheduler(Protocol):
    """What the pipeline asks of one."""

    def schedule(self, scheduled: Any) -> None:
        """Write how many drafts the step is to make of each request."""

    def update(self, scheduled: Any, output: Any) -> None:
        """The output of a step is there."""


@dataclass
class FixedScheduler:
    """Always the same length."""

    length: int

    def schedule(self, scheduled: Any) -> None:
        scheduled.num_spec_tokens_to_schedule = self.length

    def update(self, scheduled: Any, output: Any) -> None: ...


@dataclass
class Pipeline:
    """Requests that decode, some of which end and are followed by others."""

    scheduler: Scheduler
    max_draft: int
    num_requests: int
    rate: float
    """Of a draft, given that those before it were accepted."""
    clock: FakeTime = field(default_factory=FakeTime)
    verify: Curve = field(default_factory=lambda: curve(GPU_VERIFY))
    draft: Curve = field(default_factory=lambda: curve(GPU_DRAFT))
    host_ms: float = 0.5
    """For an output, and to schedule the next step."""
    noise: float = 0.02
    turnover: float = 0.0
    """Share of the requests that end with a step. Others take their place, found in the prefix
    cache but for a token, so that the scheduler pads them with drafts that nobody made."""
    kept: Callable[[int, int], int] | None = None
    """How many of a step's drafts are verified, by requests and drafts; the device drops others."""
    seed: int = 0
    tokens: int = 0
    steps: int = 0
    lengths: list[int] = field(default_factory=list)
    """What each step was to draft."""

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._ids = [f"request-{number}" for number in range(self.num_requests)]
        self._named = self.num_requests
        self._drafts = dict.fromkeys(self._ids, 0)
        """Placeholders that each request goes into the next step with."""
        self._fresh: set[str] = set()
        self._device_free = self.clock.now
        self._under_way: deque[tuple[Any, Any, float]] = deque()
        self._started = self.clock.now

    def run(self, steps: int) -> float:
        """Go on for some steps. Returns the tokens per second of these."""
        tokens, started = self.tokens, self.clock.now
        for _ in range(steps):
            self._schedule()
            if len(self._under_way) == 2:
                self._finish()
        return (self.tokens - tokens) / (self.clock.now - started)

    def _schedule(self) -> None:
        drafts = {name: self._drafts[name] for name in self._ids}
        fresh = self._fresh & set(self._ids)
        scheduled = SimpleNamespace(
            num_scheduled_tokens={name: 1 + count for name, count in drafts.items()},
            total_num_scheduled_tokens=len(drafts) + sum(drafts.values()),
            scheduled_spec_decode_tokens={n: [-1] * count for n, count in drafts.items() if count},
            num_spec_tokens_to_schedule=0,
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in fresh],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )
        self.scheduler.schedule(scheduled)
        length = scheduled.num_spec_tokens_to_schedule
        self.lengths.append(length)
        output, rows = self._compute(drafts, fresh)
        ready = max(self.clock.now, self._device_free) + self._takes(self.verify, rows)
        self._device_free = ready
        if length:
            self._device_free += self._takes(self.draft, len(drafts) * (1 + self.max_draft))
        self._under_way.append((scheduled, output, ready))
        self._fresh = set()
        self._drafts = dict.fromkeys(self._ids, length)
        self._replace_some(length)

    def _replace_some(self, length: int) -> None:
        for place in np.flatnonzero(self._rng.random(self.num_requests) < self.turnover):
            name = f"request-{self._named}"
            self._named += 1
            self._ids[place] = name
            self._fresh.add(name)
            self._drafts[name] = self.max_draft

    def _compute(self, drafts: dict[str, int], fresh: set[str]) -> tuple[Any, int]:
        names = list(drafts)
        counts = np.array([drafts[name] for name in names])
        total = int(counts.sum())
        keeps = min(total, self.kept(len(names), total)) if self.kept and total else total
        # Which drafts the device drops does not matter here: those at the ends, evenly.
        share = np.zeros_like(counts)
        while share.sum() < keeps:
            share[(share < counts) & (share == share[share < counts].min())] += 1
        lucky = self._rng.random((len(names), self.max_draft)) < self.rate
        accepted = np.minimum(np.cumprod(lucky, axis=1).sum(axis=1), share)
        accepted[[name in fresh for name in names]] = 0
        output = SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(names)},
            sampled_token_ids=[[5] * (1 + count) for count in accepted.tolist()],
        )
        return output, len(names) + int(share.sum())

    def _takes(self, costs: Curve, rows: int) -> float:
        return float(costs.at(rows)) * (1 + self.noise * float(self._rng.normal()))

    def _finish(self) -> None:
        scheduled, output, ready = self._under_way.popleft()
        self.clock.now = max(self.clock.now, ready) + self.host_ms / 1000
        self.tokens += sum(map(len, output.sampled_token_ids))
        self.steps += 1
        self.scheduler.update(scheduled, output)


def best_fixed(lengths: Sequence[int], steps: int, **settings: Any) -> tuple[float, int]:
    """The best rate that a fixed length had brought, and which that is."""
    return max((Pipeline(FixedScheduler(k), **settings).run(steps), k) for k in lengths)
