"""Messages between V2's scheduler and its workers: with a step, with its output, and once.

No step waits for the outcomes of drafts: they are sent when vLLM has waited for the step's tokens,
and only if the scheduler wants them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np, stream

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.planning import Floats, Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import NO_DRAFTS


class StepPlan(NamedTuple):
    """All that the scheduler decides about a step; the same for all workers, so that they decide
    alike."""

    runs_block: bool = False
    """Whether the drafter's block runs after the target."""
    length: int = 0
    """Most drafts of a request that the next step verifies. vLLM has room for this number."""
    lengths: Mapping[str, int] | None = None
    """The same for each request; None: it is `length` for all."""
    any_eligible: bool = True
    """Whether any request could have used drafts."""
    is_new: bool = True
    """Whether it was planned anew, so that its output is learned from; else a plan is repeated."""
    reports: bool = True
    """Whether workers send what became of the drafts that this step verifies."""
    counted: dict[str, Any] | None = None
    """Now and then, what only the scheduler counts, for `dflash_stats`
    (`DraftStatistics.scheduler_counters`)."""

    def each_length(self, count: int) -> list[int]:
        """Return the length of each of the step's `count` requests."""
        return [self.length] * count if self.lengths is None else [*self.lengths.values()]

    @classmethod
    def from_lengths(
        cls,
        lengths: Mapping[str, int],
        *,
        runs_block: bool,
        any_eligible: bool,
        is_new: bool = True,
    ) -> StepPlan:
        """Plan a step with a draft length for each request; none if none could use drafts."""
        length = max(lengths.values()) if any_eligible else 0
        is_ragged = any_eligible and min(lengths.values()) < length
        return cls(
            runs_block=runs_block and length > 0,
            length=length,
            lengths=lengths if is_ragged else None,
            any_eligible=any_eligible,
            is_new=is_new,
        )


@dataclass(frozen=True)
class WorkerFacts:
    """Facts that a worker finds out while it starts, and that the scheduler plans by."""

    costs: StepCosts
    lengths: Sequence[int]
    """Draft lengths that all requests of a step can share, including 0 and K."""
    ragged_seconds: float = 0.0
    """Extra time of a step whose requests have different lengths, in seconds."""


PLAN: Message[StepPlan] = Message("dflash_plan")
"""Scheduler to workers, with a step."""
OUTCOMES: Message[Floats] = Message("dflash_outcomes")
"""Worker to scheduler, with its output: the device's table of the output's requests, in its order,
[R, OUTCOME_COLUMNS + K]; see `Outcomes`."""
COUNTED: Message[Ints] = Message("dflash_counted")
"""Worker to scheduler, with `OUTCOMES`, and when the engine becomes idle: what the device has
counted since the start, [2, 4]; see `DraftSlots.counts`."""
FACTS: Message[WorkerFacts] = Message("dflash_facts")
"""Worker to scheduler, with the first sampled tokens."""

CHAINS_ONLY: Message[bool] = Message("dflash_chains_only")
"""Worker to scheduler, with the first sampled tokens, if requested trees are not possible."""


def plan_of(scheduler_output: SchedulerOutput) -> StepPlan:
    """Plan of a step; without any, as from a user's scheduler, a block runs if the step has room
    for drafts."""
    length = scheduler_output.num_spec_tokens_to_schedule
    return PLAN.on(scheduler_output) or StepPlan(runs_block=length > 0, length=length)


def verified_drafts(table: Floats) -> list[int]:
    """Number of each request's verified drafts; placeholders for drafts count as none."""
    return [int(count) * (source != NO_DRAFTS) for source, count in table[:, :2].tolist()]


class HostCopy:
    """Asynchronous copy of tensors' current values to the host, on a stream for copies."""

    def __init__(self, stream_of_copies: torch.cuda.Stream | None, *tensors: torch.Tensor) -> None:
        """Start the copy; the current stream does not wait. CUDA tensors need a stream."""
        self._arrival: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._values = [async_copy_to_np(tensor) for tensor in tensors]
            return
        # A blocking event: waiting threads sleep, as for vLLM's own outputs, and free the CPU.
        self._arrival = torch.cuda.Event(blocking=True)
        current = torch.cuda.current_stream(tensors[0].device)
        assert stream_of_copies is not None
        with stream(stream_of_copies, current):
            stream_of_copies.wait_stream(current)
            self._values = [async_copy_to_np(tensor) for tensor in tensors]
            self._arrival.record(stream_of_copies)

    def before_writing(self) -> None:
        """Make the current stream, not the host, wait until the tensors may be written again."""
        if self._arrival is not None:
            self._arrival.wait()

    def wait(self) -> list[np.ndarray]:
        """Wait for the copy, and return the values."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values


class ReportedOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step, with what became of the drafts that it verified."""

    def __init__(self, output: AsyncOutput, report: HostCopy, statistics: DraftStatistics) -> None:
        """Wrap an output.

        Args:
            output: vLLM's output of a step.
            report: the device's table of outcomes, [R, OUTCOME_COLUMNS + K], and what it had
                counted before, [2, 4].
            statistics: takes what was counted.
        """
        self.model_runner_output = output.model_runner_output
        self._output, self._report, self._statistics = output, report, statistics

    def get_output(self) -> ModelRunnerOutput:
        """Called by vLLM where it may block: in its own thread, or by the scheduler."""
        output, (table, counts) = self._output.get_output(), self._report.wait()
        self._statistics.take_counts(counts)
        COUNTED.attach(output, counts)
        OUTCOMES.attach(output, table)
        return output

    def get_kv_connector_output(self) -> Any:
        """Called by vLLM 0.33 for an output that failed."""
        return self.model_runner_output.kv_connector_output
