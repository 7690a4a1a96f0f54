"""vLLM's asynchronous engine on V2 as a pipeline in time, without vLLM, to judge the planner.

The scheduler hands step n + 1 to the device while step n runs. The device works in order: it runs
the target's forward, sends off the output of that step, runs the drafter's block, if there is one,
and chooses the source of each request's drafts. So the time between two outputs includes the block
of the previous step. Drafts are verified one step after they were made. Their outcome is known with
that step's output, when the next step has long been scheduled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from support.ahead_scheduler import Fixed, Ours, Scheduled
from support.cost_table import CostTable
from support.fake_time import FakeTime
from support.recorded_drafts import RecordedDrafts
from support.simulated_device import SimulatedDevice, Verified
from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.costs import NO_ATTENTION, Attention

ROOM = 16
"""Recorded tokens after the place where a request leaves a text: drafts made there are graded along
the same text."""
CHAPTERS = 4
"""Texts that a request goes through, one after the other, before it ends."""


@dataclass
class Pipeline:
    """R requests that decode; some end and are followed by others."""

    scheduler: Fixed | Ours
    drafts: RecordedDrafts
    num_requests: int
    costs: CostTable
    looks_up: bool = False
    captured: tuple[int, ...] | None = None
    """Lengths that all requests may have without `ragged_ms`; None: any length."""
    ragged_ms: float = 0.0
    attention: Attention = NO_ATTENTION
    more_context: Ints | None = None
    """Context on top of the text, by slot, [R]."""
    caches_prompts: bool = False
    """Whether prompts are cached except for a token. vLLM then gives a new request K placeholders
    for drafts that were never made."""
    host_ms: float = 0.5
    """Milliseconds for an output, and to schedule the next step."""
    noise: float = 0.02
    seed: int = 0
    pools: tuple[Ints, ...] = ()
    """Texts that each slot draws from; (): all of them."""
    lasting: tuple[int, ...] = ()
    """Slots whose request never ends."""
    clock: FakeTime = field(default_factory=FakeTime)
    block_steps: list[bool] = field(default_factory=list)
    admitted: list[Ints] = field(default_factory=list)
    """Drafts of each request that each step verified."""

    def __post_init__(self) -> None:
        count = self.num_requests
        self._rng = np.random.default_rng(self.seed)
        self.device = SimulatedDevice(self.drafts, count, looks_up=self.looks_up)
        num_texts, self._end = len(self.drafts.block_true), self.drafts.block_true.shape[1] - ROOM
        pools = self.pools or (np.arange(num_texts),) * count
        self._orders = [self._rng.permutation(pool) for pool in pools]
        self._chapter = np.zeros(count, np.int64)
        """How many texts each slot has been through."""
        self.names = [f"request-{slot}" for slot in range(count)]
        self._ends_at = np.arange(count) % CHAPTERS + 1
        self._draft_slots = np.zeros(count, np.int64)
        self._is_fresh = np.ones(count, bool)
        self._ends_at[np.array(self.lasting, np.int64)] = -1
        self.device.text[:] = [order[0] for order in self._orders]
        # All are somewhere in their texts.
        self.device.place[:] = self._rng.integers(0, self._end, count) - 1 if count > 1 else -1
        self._device_free = self.clock.now
        self.tokens = np.zeros(count, np.int64)
        """Tokens that each slot's requests got."""
        self._under_way: deque[tuple[Scheduled, Verified, Bools, float]] = deque()

    def run(self, tokens: int = 0, steps: int = 0) -> float:
        """Run at least this many tokens and steps; return their tokens per second."""
        before, started, done = int(self.tokens.sum()), self.clock.now, 0
        with self.scheduler.running():
            while self.tokens.sum() - before < tokens or done < steps:
                self._step()
                if len(self._under_way) == 2:
                    self._finish()
                done += 1
        return (int(self.tokens.sum()) - before) / (self.clock.now - started)

    def context(self) -> Ints:
        """Return the context tokens of each request, [R]."""
        found = self.drafts.prompt_lengths[self.device.text] + self.device.place
        return found if self.more_context is None else found + self.more_context

    def _step(self) -> None:
        device, fresh, slots = self.device, self._is_fresh, np.arange(self.num_requests)
        given, others = self._draft_slots.copy(), np.ones(self.num_requests, np.int64)
        if self.caches_prompts:
            given[fresh] = self.drafts.width * self.scheduler.may_draft
        else:
            others[fresh] = self.drafts.prompt_lengths[device.text[fresh]]
        context, names = self.context(), self.names.copy()
        scheduled = Scheduled(names, fresh.copy(), others, given, context)
        ahead = self.scheduler.schedule(scheduled)
        verified = device.verify(slots, given, fresh)
        self.admitted.append(verified.admitted)
        self.block_steps.append(ahead.runs_block)
        ended = self._turn_pages()
        device.choose(slots, runs_block=ahead.runs_block)
        ready = max(self.clock.now, self._device_free) + self._target_seconds(scheduled, verified)
        self._device_free = ready
        if ahead.runs_block:
            seconds = float(self.costs.draft.at(self.num_requests * (1 + self.drafts.width)))
            seconds += self.attention.block * context.sum()
            self._device_free += seconds * self._noise()
        self._under_way.append((scheduled, verified, ended, ready))
        self._draft_slots = np.minimum(ahead.lengths, self.drafts.width)
        self._is_fresh = np.zeros(self.num_requests, bool)

    def _target_seconds(self, scheduled: Scheduled, verified: Verified) -> float:
        admitted, given = verified.admitted, scheduled.given
        seconds = float(self.costs.verify.at(int(scheduled.others.sum() + admitted.sum())))
        seconds += self.attention.plain * scheduled.context.sum()
        seconds += self.attention.draft * (scheduled.context * admitted).sum()
        if self.captured is not None and (scheduled.others == 1).all():
            is_alike = (given == given[0]).all() and given[0] in self.captured
            seconds += 0.0 if is_alike else self.ragged_ms / 1000
        return float(seconds * self._noise())

    def _noise(self) -> float:
        return 1 + self.noise * float(self._rng.normal())

    def _turn_pages(self) -> Bools:
        """Move requests at the end of a text to the next one; return which end for good."""
        device = self.device
        turns = device.place >= self._end
        self._chapter += turns
        for slot in np.flatnonzero(turns):
            order = self._orders[slot]
            device.text[slot] = order[self._chapter[slot] % len(order)]
        device.place[turns] = 0
        ended: Bools = turns & (self._chapter == self._ends_at)
        return ended

    def _finish(self) -> None:
        scheduled, verified, ended, ready = self._under_way.popleft()
        self.clock.now = max(self.clock.now, ready) + self.host_ms / 1000
        is_running = np.array([a == b for a, b in zip(scheduled.names, self.names, strict=True)])
        self.tokens[is_running] += verified.produced[is_running]
        self.scheduler.update(scheduled, verified)
        for slot in np.flatnonzero(ended):
            self.names[slot] = f"request-{slot}-{self._chapter[slot]}"
            self._ends_at[slot] += CHAPTERS
            self._is_fresh[slot] = True
            self._draft_slots[slot] = 0
            self.device.place[slot] = -1
