"""Decodes recorded texts under a table of costs, with the planner of a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.draft_tree import accepted_path, chains_in, fate_of_chain
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Candidates, Likeliest, Step
from vllm_dflash.planning.tree_acceptance import NODES_BY_DEFAULT, chain_chances
from vllm_dflash.tools.simulate.cost_table import CostTable
from vllm_dflash.tools.simulate.recorded_texts import RecordedText

WARM_UP_STEPS = 100
"""Steps that do not count: the planner knows nothing of the drafter yet."""


@dataclass
class Running:
    """A request somewhere in its text."""

    name: str
    text: RecordedText
    at: int = 0
    """Of the bonus token."""
    waiting: int = 0
    """Context rows that have not been stored: that is done when the drafter needs them."""

    @property
    def left(self) -> int:
        """Tokens behind the bonus token."""
        return len(self.text.tokens) - 1 - self.at


@dataclass(frozen=True)
class Decoded:
    """What came of it."""

    tokens_per_second: float
    plain: float
    """The same of plain decoding."""
    verified: float
    """Drafts of a request and step."""
    accepted: float


def decode(
    texts: Sequence[RecordedText],
    table: CostTable,
    num_requests: int,
    steps: int,
    *,
    nodes: int = NODES_BY_DEFAULT,
) -> Decoded:
    """So many steps of so many requests; with trees of up to `nodes` nodes, or chains if 0.

    Requests that end are followed by others.
    """
    run = SimulatedDecoding(texts, table, num_requests, nodes)
    taken = [run.step() for _ in range(WARM_UP_STEPS + steps)][WARM_UP_STEPS:]
    return Decoded(
        sum(step.produced.sum() for step in taken) / sum(step.seconds for step in taken),
        num_requests / float(table.curves()[0].at_one(num_requests)),
        float(np.mean([step.verified for step in taken])),
        float(np.mean([step.accepted for step in taken])),
    )


class SimulatedDecoding:
    """An engine whose steps take as long as a table says."""

    def __init__(
        self, texts: Sequence[RecordedText], table: CostTable, num_requests: int, nodes: int
    ) -> None:
        self._verify, self._draft, self._context = table.curves()
        self._width = texts[0].candidates.shape[1]
        self._nodes = nodes
        self._planner = Planner(self._width, num_requests, table.costs(num_requests))
        self._new = (Running(f"request-{n}", texts[n % len(texts)]) for n in count())
        self.running = [next(self._new) for _ in range(num_requests)]
        self._last: Step | None = None

    def step(self) -> Step:
        """Verify what the last step drafted, and draft again."""
        step = self._verified()
        step.limits = np.array([max(min(self._width, one.left - 1), 0) for one in self.running])
        step.waiting = np.array([one.waiting for one in self.running])
        step.plan = plan = self._planner.plan(step)
        if plan.width:
            blocks = [one for one, is_it in zip(self.running, plan.drafted, strict=True) if is_it]
            step.context_rows = sum(one.waiting for one in blocks)
            for one in blocks:
                one.waiting = 0
            step.limits = np.minimum(step.limits, plan.width)
            confidence = self._block(blocks, plan.width)
            if self._nodes:
                step.candidates = self._candidates
            step.lengths = self._planner.lengths(step, confidence)
            step.draft_rows = len(blocks) * (1 + plan.width)
        self._finish(step)
        return step

    def _block(self, blocks: list[Running], width: int) -> Floats:
        """What is drafted. Returns the chances along the likeliest tokens."""
        tokens = np.stack([one.text.candidates[one.at, :width] for one in blocks])
        chances = np.stack([one.text.chances[one.at, :width] for one in blocks])
        found, order = chain_chances(chances)
        everybody = np.ones(len(blocks), bool)
        self._candidates = Candidates(tokens, chances, everybody, self._nodes)
        self._likeliest = np.take_along_axis(tokens, order, axis=2)
        return found[:, :, 0].copy()

    def _verified(self) -> Step:
        """The step that verifies what was drafted last; requests go on by what was accepted."""
        requests, last = self.running, self._last
        produced = np.ones(len(requests), np.int64)
        fates = np.zeros((3, len(requests)), np.int64)
        fates[2] = -1
        verified: Ints = np.zeros(len(requests), np.int64)
        if last is not None and len(last.lengths):
            verified = last.lengths
            for block, request in enumerate(np.flatnonzero(last.plan.drafted)):
                if verified[request]:
                    self._verify_one(last, request, block, produced, fates)
        for one, tokens in zip(requests, produced.tolist(), strict=True):
            one.at += tokens
            one.waiting += tokens
        ids = [one.name for one in requests]
        step = Step(ids, produced, len(requests) + int(verified.sum()), verified)
        step.context_lens = np.array([one.text.prompt_length + one.at for one in requests])
        step.likeliest = Likeliest(*fates) if self._nodes else None
        return step

    def _verify_one(
        self, last: Step, request: int, block: int, produced: Ints, fates: Ints
    ) -> None:
        one, length = self.running[request], int(last.lengths[request])
        writes = np.array([*one.text.tokens[one.at + 1 :], *[-1] * self._width])
        chain, trees = length, last.trees
        if trees is not None:
            places = trees.places[block, :length]
            tokens = self._candidates.tokens[block, places, trees.choices[block, :length]]
            sampled = np.array([writes[0], *writes[places + 1]])
            produced[request] += len(accepted_path(trees.parents[block, :length], tokens, sampled))
            chain = int(chains_in(trees.is_first[block : block + 1], np.array([length]))[0])
        fates[:, request] = chain, *fate_of_chain(self._likeliest[block], writes[:chain])
        if trees is None:
            produced[request] += fates[1, request]

    def _finish(self, step: Step) -> None:
        step.target_seconds = self._verify.at_one(step.rows)
        step.draft_seconds = self._draft.at_one(step.draft_rows) if step.draft_rows else 0.0
        if step.context_rows:
            step.context_seconds = self._context.at_one(step.context_rows)
        step.seconds = step.target_seconds + step.draft_seconds + step.context_seconds
        self._planner.observe(step)
        for request, one in enumerate(self.running):
            if one.left < 1:
                self.running[request] = next(self._new)
                step.lengths[request] = 0
        self._last = step
