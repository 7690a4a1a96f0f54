"""The record of one step: made when the target's output is there, and handed on.

The part that drafts makes it and measures times, the planner reads it and decides, statistics count
it. Each part writes what it learns here. V1's proposer makes records, and V2's schedulers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_dflash.planning import Bools, Floats, Ints

UNSET: Ints = np.zeros(0, dtype=np.int64)
UNSET_FLAGS: Bools = np.zeros(0, dtype=bool)
"""Values of fields that are not given: 0 or False for each request."""


@dataclass(frozen=True)
class Plan:
    """What to draft in a step of R requests."""

    drafted: Bools
    """Requests to draft, [R]; on V2 all or none."""
    width: int = 0
    """Tokens to draft for each of them; 0 if there are none. On V2 it is K, or 0."""
    lengths: Ints = field(default_factory=lambda: UNSET)
    """Drafts of each request that the next step verifies, [R]. V1 cuts them later."""
    utility_per_second: float = 0.0
    """Utility that one more second must bring: at this rate no step has more (Dinkelbach's rule
    for ratios)."""
    rate: float = 0.0
    """Expected rate (`search.rate_of`)."""
    is_probe: bool = False
    """Whether it goes against what seems to pay, to measure that: it drafts, or decodes plainly."""
    holds_for: int = 0
    """V1: next steps that need no new plan, as long as the batch stays the same."""
    of_blocks: float = 0.0
    """V2: utility of all drafts of blocks."""
    of_texts: float = 0.0
    """V2: utility of the drafts of requests whose text promises more than their block."""

    @classmethod
    def without_block(cls, num_requests: int, **fields: Any) -> Plan:
        """Make a plan in which the drafter does not run."""
        return cls(np.zeros(num_requests, dtype=bool), **fields)

    @property
    def runs_block(self) -> bool:
        """Whether the drafter runs."""
        return self.width > 0


class Predicted(NamedTuple):
    """Free drafts of R requests, and what became of the last ones; see `texts`."""

    lengths: Ints
    """Tokens that the text predicts, [R]."""
    matches: Ints
    """Tokens of the match, [R]."""
    num_observed: Ints
    """Tokens of the last prediction whose true token is known by now, [R]."""
    num_correct: Ints
    """Those that were right, up to the first wrong one, [R]."""
    last_matches: Ints
    """Tokens of the match that the last prediction followed, [R]."""

    @property
    def longest_match(self) -> int:
        """Tokens of the longest match that predicts something; 0: nothing is predicted."""
        return int((self.matches * (self.lengths > 0)).max(initial=0))


NO_DRAFTS, BLOCK, TEXT = 0, 1, 2
"""What produced a request's drafts; placeholders of vLLM's count as `NO_DRAFTS`."""


COUNTS = 8
"""Number of fields of `Outcomes` that hold one count for each request; they come first."""


class Outcomes(NamedTuple):
    """What became of the drafts of R requests, as the device saw it."""

    source: Ints
    """What produced them, [R]."""
    admitted: Ints
    """Drafts that were verified, and placeholders for them, [R]."""
    matches: Ints
    """Tokens of the match in the last look-up, [R]."""
    text_lengths: Ints
    """Tokens that this look-up predicted, [R]."""
    num_observed: Ints
    """Predicted tokens that are compared with the true ones, [R]: those that are known by now, but
    only the first unless the text's drafts were verified."""
    num_correct: Ints
    """Those that were right, up to the first wrong one, [R]."""
    verified_in_chain: Ints
    """Drafts that were verified; in a tree, only those on its argmax chain, [R]."""
    accepted: Ints
    """Accepted drafts among those, [R]."""
    confidence: Floats
    """The drafter's confidence in its last block; 0: no block, or not a finite draft, [R, K]."""
    tokens_if_truncated: Ints
    """Tokens that a tree would have yielded at each of C smaller sizes, [R, C]; 0 for chains."""

    @staticmethod
    def from_table(table: Floats, num_cuts: int = 0) -> Outcomes:
        """Read the device's table: counts, then `tokens_if_truncated`, then `confidence`,
        [R, COUNTS + C + K].

        Its confidence is below 0 where a draft was not finite.
        """
        table = np.maximum(table, 0.0)
        first = COUNTS + num_cuts
        # Each field is contiguous: each is read by itself.
        counts = np.ascontiguousarray(table[:, :first].T, dtype=np.int64)
        tokens_if_truncated = np.ascontiguousarray(counts[COUNTS:].T)
        return Outcomes._make(
            [*counts[:COUNTS], table[:, first:].astype(np.float64), tokens_if_truncated]
        )


@dataclass
class StepRecord:
    """A step of an engine that runs R requests. Seconds are wall-clock."""

    ids: Sequence[str]
    """Ids of the requests, [R]."""
    produced: Ints
    """Tokens that each got, including the bonus token; 0 while it is in its prompt, [R]."""
    rows: int = 0
    """Rows that the target ran: prompt tokens, and one and its drafts for each decoding request."""
    verified: Ints = field(default_factory=lambda: UNSET)
    """Drafts of each that the target verified, [R]. On V2 vLLM's placeholders for drafts count as
    well: they take as long."""
    verified_free: Ints = field(default_factory=lambda: UNSET)
    """Drafts among those that its text predicted, [R]."""

    max_drafts: Ints = field(default_factory=lambda: UNSET)
    """Most drafts that each can use in the next step, [R]; after drafting, the finite ones."""
    predicted: Predicted | None = None
    """What the text predicts, and what became of its last prediction; None: nothing at all."""
    context_lens: Ints = field(default_factory=lambda: UNSET)
    """Tokens of context of each, where known, [R]."""
    repeats_plan: bool = False
    """Whether an earlier step's plan is repeated."""
    plan: Plan = field(default_factory=lambda: Plan.without_block(0))
    """V1: what this step drafts."""
    any_eligible: bool = False
    """Whether any request could have used a draft."""
    lengths: Ints = field(default_factory=lambda: UNSET)
    """Drafts of each that go on to be verified, [R]."""
    from_text: Bools = field(default_factory=lambda: UNSET_FLAGS)
    """Whether those are what the text predicts, [R]."""
    nan_drafts: int = 0
    """Drafts thrown away because their logits were not finite."""

    draft_rows: int = 0
    """Rows of the block whose time is part of the step's, 0 if there is none: the block after this
    step's target (V1), or after the last step's (V2)."""
    draft_seconds: float = 0.0
    context_rows: int = 0
    """Context rows that were stored."""
    context_seconds: float = 0.0
    planning_seconds: float = 0.0
    seconds: float = 0.0
    """From the end of the previous step to the end of this one; 0 after a pause."""
    target_seconds: float = 0.0
    """`seconds` less draft and context, of a step that only decoded; 0 where it is not known or
    tells nothing. V2's schedulers leave the block in."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is UNSET or value is UNSET_FLAGS:
                setattr(self, name, np.zeros(len(self.ids), value.dtype))

    @property
    def num_requests(self) -> int:
        """Number of requests, R."""
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
    def prompt_rows(self) -> int:
        """Rows that belong to prompts, except the one that yields a prompt's first token."""
        return self.rows - int(self.decoding.sum()) - int(self.verified.sum())

    @property
    def only_decodes(self) -> bool:
        """Whether it decoded, and no prompt took part."""
        return len(self.ids) > 0 and self.prompt_rows == 0 and bool(self.decoding.all())

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Add the time of what runs inside to the seconds of `draft`, `context` or `planning`."""
        name = f"{part}_seconds"
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - started)
