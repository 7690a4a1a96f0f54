"""The one record of a step: made when the target's output is there, and handed on.

Whoever drafts makes it and measures times, the planner reads it and decides, statistics count it.
Whoever learns something writes it here. Three things make steps: the proposer (V1), the schedulers
of V2, and the simulated engine of the tests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.draft_tree import Candidates, Trees


@dataclass(frozen=True)
class Plan:
    """What to draft in a step of R requests."""

    drafted: Bools
    """[R]."""
    width: int
    """Tokens to draft for each of them; 0 if there are none."""
    price: float
    """Tokens a second is worth: the best rate to be had."""
    speedup: float
    """Expected rate against plain decoding."""
    is_probe: bool = False
    least: int = 0
    """Drafts to verify of each request whatever they seem worth."""
    skip_steps: int = 0
    """Steps to come for which nobody need be asked again, as long as the batch stays the same."""
    uses_text: bool = False
    """Whether drafts that the text foretells may be worth it."""

    @classmethod
    def nothing(
        cls,
        num_requests: int,
        price: float = 0.0,
        skip_steps: int = 0,
        *,
        speedup: float = 1.0,
        uses_text: bool = False,
    ) -> Plan:
        """The drafter drafts nobody."""
        nobody = np.zeros(num_requests, dtype=bool)
        return cls(nobody, 0, price, speedup, skip_steps=skip_steps, uses_text=uses_text)


class Foretold(NamedTuple):
    """Free drafts of R requests, and what became of the last ones; see `suffix_match`."""

    lengths: Ints
    """Tokens that the text foretells, [R]."""
    matches: Ints
    """Tokens that stood there before, as they do now, [R]."""
    known: Ints
    """Of the tokens that were foretold last: how many there is a true one for by now, [R]."""
    came_true: Ints
    """Of those: how many first ones were right, [R]."""


class Likeliest(NamedTuple):
    """What became of the first nodes of verified trees that are the likeliest of their places: of
    the chain in each tree. R requests; where drafts were a chain, of all of them."""

    verified: Ints
    """[R]."""
    accepted: Ints
    """Of those, [R]."""
    missed: Ints
    """Rank of what the target wrote in the place of the first that was not accepted; see
    `learn_ranks`, [R]."""


def _nothing_yet() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass
class Step:
    """A step of an engine that runs R requests. Seconds are wall-clock."""

    ids: Sequence[str]
    """Of the requests, [R]."""
    produced: Ints
    """Tokens each got, the bonus token included; 0 while it is in its prompt, [R]."""
    rows: int = 0
    """Rows the target ran: prompt tokens, and for each decoding request one and its drafts."""
    verified: Ints = field(default_factory=_nothing_yet)
    """Drafts of each that the target verified, [R]."""
    verified_free: Ints = field(default_factory=_nothing_yet)
    """Of those, what its text foretold, [R]."""
    likeliest: Likeliest | None = None
    """Where drafts may be trees: what became of the chains in them."""

    limits: Ints = field(default_factory=_nothing_yet)
    """Drafts each can use at most in the next step, [R]; after drafting, those that are finite."""
    foretold: Foretold | None = None
    """What the text foretells, and what came of what it foretold before; None: nothing at all."""
    agreed: Ints = field(default_factory=_nothing_yet)
    """First drafts of each, of those that were drafted, that the text foretells as well, [R]."""
    context_lens: Ints = field(default_factory=_nothing_yet)
    """Tokens of context of each, where that is known, [R]."""
    waiting: Ints = field(default_factory=_nothing_yet)
    """Context rows of each that must be stored before it can be drafted, [R]."""
    is_resting: bool = False
    """Whether it was decided before that the drafter drafts nobody in this step."""
    plan: Plan = field(default_factory=lambda: Plan.nothing(0))
    """What this step drafts."""
    could_draft: bool = False
    """Whether anybody could have used a draft."""
    lengths: Ints = field(default_factory=_nothing_yet)
    """Drafts of each that go on to be verified, [R]."""
    candidates: Candidates | None = None
    """What else the drafter thinks of the drafted requests' places, where drafts may be trees."""
    trees: Trees | None = None
    """The likeliest of these that can be verified."""
    from_text: Bools = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """Whether those are what the text foretells, [R]."""
    nan_drafts: int = 0
    """Drafts thrown away because their logits were not finite."""

    draft_rows: int = 0
    """Rows of the drafter's block forward that took part of its time; 0 where none did."""
    draft_seconds: float = 0.0
    context_rows: int = 0
    """Context rows that were stored."""
    context_seconds: float = 0.0
    planning_seconds: float = 0.0
    seconds: float = 0.0
    """From the end of the step before to the end of this one; 0 after a pause."""
    target_seconds: float = 0.0
    """All of that but draft and context, of a step that only decoded, or the mean of several that
    were alike; 0 where it is not known or tells nothing."""
    count: int = 1
    """Steps that this one stands for: undrafted ones of the same batch, one after the other."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray) and not len(value):
                setattr(self, name, np.zeros(len(self.ids), value.dtype))

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.ids)

    @property
    def decoding(self) -> Bools:
        """Requests that are past their prompt, [R]."""
        return self.produced > 0

    @property
    def accepted(self) -> Ints:
        """Verified drafts of each that were accepted, [R]."""
        return np.where((self.verified > 0) & self.decoding, self.produced - 1, 0)

    @property
    def chains(self) -> tuple[Ints, Ints]:
        """Of the drafts that were verified, those in chains of likeliest tokens, and how many of
        these were accepted, [R] each."""
        found = self.likeliest
        return (self.verified, self.accepted) if found is None else (found.verified, found.accepted)

    @property
    def prompt_rows(self) -> int:
        """Rows that belong to prompts, but for the one that yields a prompt's first token."""
        return self.rows - int(self.decoding.sum()) - int(self.verified.sum())

    @property
    def only_decodes(self) -> bool:
        """Whether it decoded, and no prompt took part."""
        return len(self.ids) > 0 and self.prompt_rows == 0 and bool(self.decoding.all())

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add what runs inside to the seconds of `draft`, `context` or `planning`."""
        name = f"{part}_seconds"
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)


class StepEstimate(NamedTuple):
    """What a step was expected to take, in the parts of a `Step`."""

    target_seconds: float
    draft_seconds: float
    context_seconds: float
    plain_seconds: float
    """What its requests would have taken for one token each without any drafts."""


class StepClock:
    """Times steps, from the end of one to the end of the next.

    The engine never waits while it has unfinished requests, so where a request goes on, all the
    time since the last step is part of this one.
    """

    def __init__(self) -> None:
        self._ended = 0.0
        self._last: Step | None = None
        self._held = 0
        """Steps that the next one of their kind is to stand for."""
        self._held_seconds = 0.0

    def finish(self, step: Step, *, hold: bool = False) -> Step | None:
        """The step is over: write its seconds.

        Args:
            step: which one.
            hold: whether to wait for more steps like this one, and to take them together.

        Returns:
            Those that were held, as one, if this step is not like them.
        """
        now = time.perf_counter()
        last, self._last = self._last, step if step.ids else None  # an empty step is a pause
        since, self._ended = now - self._ended, now
        is_same_batch = last is not None and last.ids == step.ids
        held = None
        if self._held and last is not None and step.verified.any():  # the held ones did not verify
            mean = self._held_seconds / self._held
            held = replace(last, target_seconds=mean, count=self._held)
        if not (is_same_batch and step.only_decodes) or held is not None:
            self._held, self._held_seconds = 0, 0.0
        if not is_same_batch and (last is None or set(last.ids).isdisjoint(step.ids)):
            return held
        step.seconds = since
        if not step.only_decodes:
            return held
        self._held += 1
        self._held_seconds += since - step.draft_seconds - step.context_seconds
        if not hold:
            step.target_seconds = self._held_seconds / self._held
            step.count = self._held
            self._held, self._held_seconds = 0, 0.0
        return held
