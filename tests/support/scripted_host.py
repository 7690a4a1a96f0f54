"""V1's step without a model, whose planner and drafter do as they are told."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.configs_by_hand import QWEN
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.engine.cadence import Cadence
from vllm_dflash.engine.v1.block_forward import BlockDrafts
from vllm_dflash.engine.v1.host_step import HostStep
from vllm_dflash.engine.v1.target_batch import TargetBatch
from vllm_dflash.planning import Bools, Floats, Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Plan, StepRecord
from vllm_dflash.planning.texts import NgramIndex

OPTIONS = EngineOptions(32, 7, "adaptive", parse_config("z-lab/it", QWEN))
CONTEXT = 10
"""Tokens of a request's context, before it gets its one token."""
LONGEST, MOST_FREE = 64, 6


class Blocks:
    """Replaces the drafter. Drafts 20, 21, 22 and so on, of which `finite` are finite."""

    reads_newest = False

    def __init__(self, finite: int = 7) -> None:
        self.finite = finite
        self.newest: torch.Tensor | None = None

    def draft(
        self, inputs: BlockInputs, _: torch.Tensor, newest: torch.Tensor | None
    ) -> BlockDrafts:
        self.newest = newest
        lengths = np.diff(inputs.query_start_loc) - 1
        tokens = [[*range(20, 20 + min(length, self.finite))] for length in lengths.tolist()]
        return BlockDrafts(inputs.requests, tokens, np.ones((len(lengths), lengths.max())))


def drafting(*drafted: bool, width: int = 4, **fields: Any) -> Plan:
    return Plan(np.array(drafted), width, utility_per_second=1.0, **fields)


class Scripted(Planner):
    """Drafts and skips as told, then skips. Verifies at most two drafts of each request."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(7, 1)
        self.is_started = True
        self.plans = list(plans)
        self.asked: list[dict[str, Any]] = []
        """What each plan was made from, by name."""
        self.done: list[str] = []
        """What it was asked to do, in order."""

    def plan(self, ids: Sequence[str], context_lens: Ints, max_drafts: Ints, **more: Any) -> Plan:
        self.asked.append({"limits": max_drafts.tolist(), **more})
        self.done.append("plan")
        return self.plans.pop(0) if self.plans else Plan.without_block(len(ids))

    def learn_drafts(self, step: StepRecord) -> None:
        self.done.append("learn")

    def record_step(self, step: StepRecord) -> None: ...

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        assert len(confidence) == step.plan.drafted.sum()
        return np.minimum(step.max_drafts, 2) * step.plan.drafted, np.zeros(step.num_requests, bool)


class FromText(Scripted):
    """Verifies all drafts that texts predict."""

    def choose(self, step: StepRecord, confidence: Floats) -> tuple[Ints, Bools]:
        assert step.predicted is not None
        return step.predicted.lengths, step.predicted.lengths > 0


class Every(Cadence):
    """Plans every so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def interval(self) -> int:
        return self.steps


class Host(HostStep):
    """A host step that gets its drafts from `Blocks`."""

    def __init__(
        self, policy: Any = None, *, finite: int = 7, looks_up: bool = False, every: int = 1
    ) -> None:
        stored = SimpleNamespace(store=lambda *rows: None)
        super().__init__(OPTIONS, Blocks(finite), stored, 16)  # type: ignore[arg-type]
        self.planner = policy or self.planner
        self._cadence = Every(every)
        self.all_texts = np.arange(8 * LONGEST, dtype=np.int32).reshape(8, LONGEST)
        if looks_up:
            self.free_drafts = NgramIndex(8)

    def make(
        self,
        *limits: int,
        names: str = "abcdefgh",
        sampled: list[list[int]] | None = None,
        context: int = CONTEXT,
    ) -> tuple[StepRecord, TargetBatch]:
        """Make the next step: a request for each limit, which gets its `sampled` tokens, or one."""
        count = len(limits)
        sampled = sampled or [[1000 + request] for request in range(count)]
        produced = np.array([len(tokens) for tokens in sampled])
        width = max(map(len, sampled))
        padded = np.array([tokens + [-1] * (width - len(tokens)) for tokens in sampled], np.int32)
        step = StepRecord([*names[:count]], produced, rows=count)
        step.context_lens = context + produced - 1
        ends = step.context_lens + 2 + np.array(limits)
        batch = TargetBatch(
            features=torch.zeros(count, 2),
            positions=torch.zeros(count, dtype=torch.int64),
            slots=torch.zeros(count, dtype=torch.int64),
            query_start_loc=np.arange(count + 1),
            num_rejected=np.zeros(count, np.int32),
            block_table=torch.zeros(count, 8, dtype=torch.int32),
            sampled=padded,
            bonus_ids=np.array([tokens[-1] if tokens else 0 for tokens in sampled]),
            texts=self.all_texts,
            text_limits=ends,
            block_limits=ends,
            most_free=MOST_FREE,
        )
        return step, batch

    def step(self, *limits: int, **more: Any) -> tuple[StepRecord, list[list[int]]]:
        """Run a step to its end."""
        step, batch = self.make(*limits, **more)
        drafts = self.run(step, batch)
        self.end(step)
        return step, drafts

    def verify(self, names: str, verified: list[int], produced: list[int]) -> StepRecord:
        """Run a step that verified so many drafts of each request; none can use more drafts."""
        sampled = [[1000 + number for number in range(count)] for count in produced]
        step, batch = self.make(*[0] * len(names), names=names, sampled=sampled)
        step.verified = np.array(verified)
        self.run(step, batch)
        self.end(step)
        return step
