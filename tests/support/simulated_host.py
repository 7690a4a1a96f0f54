"""V1 as a simulation in time: the real `HostStep`, with its backlog and its index of texts,
between a target and a drafter that only know how long they take and what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from support.configs_by_hand import QWEN
from support.cost_table import CostTable
from support.fake_time import FakeTime
from support.recorded_drafts import recording
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine import step_clock
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.v1 import host_step
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import BlockDrafts
from vllm_dflash.engine.v1.host_step import HostStep
from vllm_dflash.engine.v1.target_batch import TargetBatch
from vllm_dflash.planning import Floats, Ints, step
from vllm_dflash.planning.costs import NO_ATTENTION, Attention
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord
from vllm_dflash.planning.texts import NgramIndex

WIDTH, MOST_FREE, BLOCK_SIZE = 7, 32, 16
OPTIONS = EngineOptions(MOST_FREE, WIDTH, "adaptive", parse_config("z-lab/it", QWEN))
PER_REQUEST_MS = 0.3
"""Time of each request in a step that no profile sees."""


@dataclass
class Written:
    """A request: its tokens, and the drafts that the drafter would make at each of them."""

    tokens: Ints
    prompt: int
    drafts: Ints
    """After each token that the request gets, [T, K]."""
    confidence: Floats
    """[T, K]."""


def recorded(kind: int, seed: int = 0) -> Iterator[Written]:
    """Yield recorded texts (`recorded_drafts.py`) in random order: greedy, drawn, or copies."""
    texts, prompts, drafts, confidence, kinds = recording()
    rng = np.random.default_rng(seed)
    while True:
        for each in rng.permutation(kinds[kind]):
            yield Written(texts[each], int(prompts[each]), drafts[each], confidence[each])


def made_up(
    rate: float, length: int = 200, prompt: int = 40, seed: int = 0, overrated: float = 1.0
) -> Iterator[Written]:
    """Yield texts that never repeat themselves, of whose drafts each is right at this rate if those
    before it are; confidence is that to the power `overrated`."""
    rng = np.random.default_rng(seed)
    while True:
        tokens = rng.integers(1, 1 << 30, prompt + length + WIDTH + 1)
        truth = np.clip(rate + rng.normal(0, 0.03, (length, WIDTH)), 0.005, 0.99)
        at = prompt + 1 + np.arange(length)[:, None] + np.arange(WIDTH)
        right = rng.random((length, WIDTH)) < truth
        drafts = np.where(right, tokens[np.minimum(at, len(tokens) - 1)], 0)
        yield Written(tokens, prompt, drafts, truth**overrated)


class Static(Planner):
    """Drafts as many tokens for each slot as it is told, always."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(max(lengths), 1)
        self.lengths = lengths

    def _wanted(self, ids: Sequence[str], max_drafts: Ints) -> Ints:
        slots = [int(name.split("-")[0]) % len(self.lengths) for name in ids]
        return np.minimum(np.array(self.lengths)[slots], max_drafts)

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **_: object) -> Plan:
        wanted = self._wanted(ids, max_drafts)
        return Plan(wanted > 0, int(wanted.max(initial=0)))

    def choose(self, step: StepRecord, confidence: Floats) -> Any:
        return self._wanted(step.ids, step.max_drafts), np.zeros(len(step.ids), bool)


@dataclass
class SimulatedHost:
    """R slots, each with a stream of requests."""

    streams: Sequence[Iterator[Written]]
    table: CostTable
    policy: Planner | None = None
    """None: ours."""
    attention: Attention = NO_ATTENTION
    scale: float = 1.0
    """Factor by which the profile of the target is wrong."""
    looks_up: bool = True
    longest: int = 1024
    noise: float = 0.03
    seed: int = 0
    make_planner: Callable[..., Any] = Planner
    clock: FakeTime = field(default_factory=FakeTime)
    steps: int = 0

    def __post_init__(self) -> None:
        num, self._rng = len(self.streams), np.random.default_rng(self.seed)
        self.host = HostStep(OPTIONS, self, self, BLOCK_SIZE)  # type: ignore[arg-type]
        num_slots = num * self.longest
        if self.policy is None:
            costs = self.table.costs(num, self.attention, self.scale)
            self.host.planner = self.make_planner(
                WIDTH, num, costs, most_free=MOST_FREE * self.looks_up
            )
            if self.looks_up:
                self.host.free_drafts = NgramIndex(num)
        else:
            self.host.planner = self.policy
        if self.policy is None or 0 in getattr(self.policy, "lengths", ()):
            self.host.backlog = ContextBacklog(
                self,  # type: ignore[arg-type]
                2,
                torch.float32,
                num_slots=num_slots,
                page_size=BLOCK_SIZE,
            )
        self._texts = np.zeros((num, self.longest), np.int32)
        self._table = torch.arange(num_slots // BLOCK_SIZE, dtype=torch.int32).reshape(num, -1)
        self._requests: list[Any] = [None] * num
        self._names, self._numbers = [""] * num, count()
        self._context, self._drafts = np.zeros(num, np.int64), [[] for _ in range(num)]  # type: ignore[var-annotated]
        self.tokens = np.zeros(num, np.int64)
        """Tokens that each slot's requests got."""
        self.drafted = np.zeros(num, np.int64)
        """Steps in which each slot was drafted."""

    # --- what HostStep asks of a drafter and its context projection -----------------------------

    reads_newest = False

    def store(self, features: torch.Tensor, *_: Any) -> None:
        self.clock.now += float(self.table.context.at(len(features))) * self._noise()

    def draft(self, inputs: BlockInputs, *_: Any) -> BlockDrafts:
        widths = np.diff(inputs.query_start_loc) - 1
        seconds = float(self.table.draft.at(len(inputs.input_ids)))
        seconds += self.attention.block * float(self._context[inputs.requests].sum())
        self.clock.now += seconds * self._noise()
        tokens, confidence = [], np.zeros((len(widths), widths.max()))
        for row, (slot, width) in enumerate(zip(inputs.requests, widths, strict=True)):
            request = self._requests[slot]
            place = min(self._context[slot] - request.prompt, len(request.drafts) - 1)
            tokens.append(request.drafts[place, :width].tolist())
            confidence[row, :width] = request.confidence[place, :width]
        self.drafted[inputs.requests] += 1
        return BlockDrafts(inputs.requests, tokens, confidence)

    # --------------------------------------------------------------------------------------------

    def run(self, steps: int = 0, seconds: float = 0.0) -> float:
        """Run so many steps, and seconds; return tokens per second."""
        before, started, done = int(self.tokens.sum()), self.clock.now, 0
        with (
            patch.object(step_clock, "time", self.clock),
            patch.object(step, "time", self.clock),
            patch.object(host_step, "from_rank_0", lambda value: value),
        ):
            while done < steps or self.clock.now - started < seconds:
                self._step()
                done += 1
        self.steps += done
        return (int(self.tokens.sum()) - before) / (self.clock.now - started)

    def _noise(self) -> float:
        return 1 + self.noise * float(self._rng.normal())

    def _step(self) -> None:
        num = len(self.streams)
        admitted, ended = self._admit()
        self.host.begin_step(admitted, ended)
        fresh = np.array([name in admitted for name in self._names])
        verified = np.array([len(drafts) for drafts in self._drafts])
        rows, produced, sampled = 1 + verified, np.ones(num, np.int64), []
        first = self._context.copy()
        for slot, request in enumerate(self._requests):
            if fresh[slot]:
                rows[slot], first[slot] = request.prompt, 0
                self._context[slot] = request.prompt
                sampled.append([request.tokens[request.prompt]])
                continue
            known = self._context[slot] + 1
            right = request.tokens[known : known + len(self._drafts[slot])]
            good = 0
            while good < len(right) and right[good] == self._drafts[slot][good]:
                good += 1
            sampled.append(request.tokens[known : known + good + 1].tolist())
            produced[slot] = 1 + good
            self._context[slot] += 1 + good
        total = int(rows.sum())
        seconds = float(self.table.verify.at(total)) + PER_REQUEST_MS / 1000 * num
        seconds += self.attention.plain * self._context.sum()
        seconds += self.attention.draft * (self._context * verified).sum()
        self.clock.now += seconds * self._noise()
        ids = self._names.copy()
        done = StepRecord(ids, produced, total)
        done.verified, done.context_lens = np.where(fresh, 0, verified), self._context.copy()
        longest = max(map(len, sampled))
        starts = np.concatenate([[0], np.cumsum(rows)])
        positions = np.concatenate([a + np.arange(n) for a, n in zip(first, rows, strict=True)])
        owners = np.repeat(np.arange(num), rows)
        ends = np.array([len(one.tokens) for one in self._requests])
        batch = TargetBatch(
            features=torch.zeros(total, 2),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(owners * self.longest + positions),
            query_start_loc=starts.astype(np.int32),
            num_rejected=np.where(fresh, 0, rows - produced).astype(np.int32),
            block_table=self._table,
            sampled=np.array([[*one, *[-1] * (longest - len(one))] for one in sampled], np.int32),
            bonus_ids=np.array([one[-1] for one in sampled]),
            texts=self._texts,
            text_limits=ends * self.looks_up,
            block_limits=ends,
            most_free=MOST_FREE,
        )
        self._drafts = self.host.run(done, batch)
        self.host.end(done)
        self.tokens += produced

    def _admit(self) -> tuple[set[str], set[str]]:
        """Replace requests that are at their end."""
        admitted, ended = set(), set()
        for slot, request in enumerate(self._requests):
            if request is not None and self._context[slot] < len(request.tokens) - WIDTH - 2:
                continue
            if request is not None:
                ended.add(self._names[slot])
                if self.host.backlog is not None:
                    self.host.backlog.drop(self._table[slot].tolist(), BLOCK_SIZE)
            self._requests[slot] = fresh = next(self.streams[slot])
            self._texts[slot, : fresh.prompt] = fresh.tokens[: fresh.prompt]
            self._names[slot], self._drafts[slot] = f"{slot}-{next(self._numbers)}", []
            admitted.add(self._names[slot])
        return admitted, ended
