"""Decodes recorded texts under a table of costs, with the planner of a real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dflash.planning import Ints
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
    for _ in range(WARM_UP_STEPS):
        run.step()
    before = run.tokens, run.seconds, run.verified, run.accepted
    for _ in range(steps):
        run.step()
    after = run.tokens, run.seconds, run.verified, run.accepted
    tokens, seconds, verified, accepted = (b - a for a, b in zip(before, after, strict=True))
    of_all = steps * num_requests
    plain = num_requests / float(table.curves()[0].at_one(num_requests))
    return Decoded(tokens / seconds, plain, verified / of_all, accepted / of_all)


class SimulatedDecoding:
    """An engine whose steps take as long as a table says."""

    def __init__(
        self,
        texts: Sequence[RecordedText],
        table: CostTable,
        num_requests: int,
        nodes: int,
    ) -> None:
        self._verify, self._draft, self._context = table.curves()
        self._width = texts[0].candidates.shape[1]
        self._nodes = nodes
        self._planner = Planner(self._width, num_requests, table.costs(num_requests))
        self._new = self._admitted(texts)
        self._running = [next(self._new) for _ in range(num_requests)]
        self._last = Step([], np.zeros(0, np.int64))
        self.tokens, self.verified, self.accepted, self.seconds = 0, 0, 0, 0.0

    def _admitted(self, texts: Sequence[RecordedText]) -> Iterator[Running]:
        count = 0
        while True:
            yield Running(f"request-{count}", texts[count % len(texts)])
            count += 1

    def step(self) -> None:
        """Verify what the last step drafted, and draft again."""
        step = self._verified()
        requests = self._running
        step.limits = np.array([max(min(self._width, one.left - 1), 0) for one in requests])
        step.waiting = np.array([one.waiting for one in requests])
        step.plan = plan = self._planner.plan(step)
        if plan.width:
            blocks = [one for one, is_it in zip(requests, plan.drafted, strict=True) if is_it]
            step.context_rows = sum(one.waiting for one in blocks)
            for one in blocks:
                one.waiting = 0
            step.limits = np.minimum(step.limits, plan.width)
            order, confidence, candidates = self._block(blocks, plan.width)
            if self._nodes:
                step.candidates = candidates
            step.lengths = self._planner.lengths(step, confidence)
            step.draft_rows = len(blocks) * (1 + plan.width)
            self._likeliest = np.take_along_axis(candidates.tokens, order, axis=2)
            self._candidates = candidates
        self._finish(step)

    def _block(self, blocks: list[Running], width: int) -> tuple[Ints, np.ndarray, Candidates]:
        """What is drafted: order and chances along the likeliest tokens, and all candidates."""
        tokens = np.stack([one.text.candidates[one.at, :width] for one in blocks])
        chances = np.stack([one.text.chances[one.at, :width] for one in blocks])
        found, order = chain_chances(chances)
        branches = np.ones(len(blocks), bool)
        return order, found[:, :, 0].copy(), Candidates(tokens, chances, branches, self._nodes)

    def _verified(self) -> Step:
        """The step that verifies what was drafted last; requests go on by what was accepted."""
        last, count = self._last, len(self._running)
        verified = last.lengths if len(last.ids) else np.zeros(count, np.int64)
        produced = np.ones(count, np.int64)
        fates = np.zeros((3, count), np.int64)
        fates[2] = -1
        block = 0
        for request, one in enumerate(self._running):
            drafted = bool(len(last.ids)) and bool(last.plan.drafted[request])
            if drafted and verified[request]:
                self._verify_one(one, request, block, int(verified[request]), produced, fates)
            block += drafted
        for request, one in enumerate(self._running):
            one.at += int(produced[request])
            one.waiting += int(produced[request])
        ids = [one.name for one in self._running]
        step = Step(ids, produced, count + int(verified.sum()), verified)
        step.context_lens = np.array([one.text.prompt_length + one.at for one in self._running])
        step.likeliest = Likeliest(*fates) if self._nodes else None
        return step

    def _verify_one(
        self, one: Running, request: int, block: int, length: int, produced: Ints, fates: Ints
    ) -> None:
        writes = np.array([*one.text.tokens[one.at + 1 :], *[-1] * self._width])
        likeliest = self._likeliest[block]  # [w, C]
        chain, trees = length, self._last.trees
        if trees is not None:
            places = trees.places[block, :length]
            tokens = self._candidates.tokens[block, places, trees.choices[block, :length]]
            sampled = np.array([writes[0], *writes[places + 1]])
            produced[request] += len(accepted_path(trees.parents[block, :length], tokens, sampled))
            chain = int(chains_in(trees.is_first[block : block + 1], np.array([length]))[0])
        fates[:, request] = chain, *fate_of_chain(likeliest, writes[:chain])
        if trees is None:
            produced[request] += fates[1, request]

    def _finish(self, step: Step) -> None:
        rows = int(step.verified.sum()) + step.num_requests
        step.target_seconds = self._verify.at_one(rows)
        step.draft_seconds = self._draft.at_one(step.draft_rows) if step.draft_rows else 0.0
        if step.context_rows:
            step.context_seconds = self._context.at_one(step.context_rows)
        step.seconds = step.target_seconds + step.draft_seconds + step.context_seconds
        self._planner.observe(step)
        self.seconds += step.seconds
        self.tokens += int(step.produced.sum())
        self.verified += int(step.verified.sum())
        self.accepted += int(step.accepted.sum())
        for request, one in enumerate(self._running):
            if one.left < 1:
                self._running[request] = next(self._new)
                step.lengths[request] = 0
        self._last = step
