"""Messages between V2's scheduler and its workers: with a step, with its output, and once.

No step waits for the outcomes of drafts: they are counted and sent when vLLM has waited for the
step's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np, stream

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2.block_timer import BlockTime
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.planning import Floats
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.step import NO_DRAFTS, TEXT, Learned
from vllm_dflash.planning.window import WHOLE, Window


@dataclass(frozen=True)
class Directions:
    """How a step drafts: the same for all workers, so that they decide alike."""

    runs_block: bool
    """Whether the drafter's block runs after the target."""
    min_verified: int = 0
    """Minimum of this step's drafts that the next step verifies, whatever they seem worth."""
    could_draft: bool = True
    """Whether any request could have used drafts."""
    has_new_plan: bool = True
    """Whether the step has a new plan, so that its budget is computed anew as well."""
    learned: Learned | None = None
    """Costs and rates for budgets and chances from now on; None: no change."""
    window: Window = WHOLE
    """What the block attends to."""
    window_report: list[dict[str, Any]] | None = None
    """What windows were chosen by, for `dflash_stats`; None: no news."""
    counted: dict[str, Any] | None = None
    """What the scheduler has counted (`DraftStatistics.of_planning`), for `dflash_stats`."""


@dataclass(frozen=True)
class WorkerFacts:
    """Facts that a worker finds out while it starts, and that the scheduler plans by."""

    costs: StepCosts
    lengths: Sequence[int]
    """Draft lengths that all requests of a step can share, including 0 and K."""
    trims: bool = False
    """Whether the device drops drafts that are not worth verifying."""
    ragged_seconds: float = 0.0
    """Extra time of a step whose requests have different lengths, in seconds."""


DIRECTIONS: Message[Directions] = Message("dflash_directions")
"""Scheduler to workers, with a step."""
OUTCOMES: Message[Floats] = Message("dflash_outcomes")
"""Worker to scheduler, with its output: the device's table of the output's requests, in its order,
[R, OUTCOME_COLUMNS + K]; see `Outcomes`."""
BLOCK_SECONDS: Message[float] = Message("dflash_block_seconds")
"""Worker to scheduler, with the output of the step after: time of a block. Sent if the scheduler
chooses draft windows."""
FACTS: Message[WorkerFacts] = Message("dflash_facts")
"""Worker to scheduler, with the first sampled tokens."""

CHAINS_ONLY: Message[bool] = Message("dflash_chains_only")
"""Worker to scheduler, with the first sampled tokens, if requested trees are not possible."""


def directions_of(scheduler_output: SchedulerOutput) -> Directions:
    """Directions for a step; without any, a block runs if the step has places for drafts."""
    return DIRECTIONS.on(scheduler_output) or Directions(
        runs_block=scheduler_output.num_spec_tokens_to_schedule > 0
    )


def verified_drafts(table: Floats) -> list[tuple[int, int]]:
    """Number of each request's verified drafts, and how many of them its text predicted."""
    return [
        (int(n) * (source != NO_DRAFTS), int(n) * (source == TEXT))
        for source, n in table[:, :2].tolist()
    ]


class HostCopy:
    """Asynchronous copy of a tensor's current values to the host, on a stream for copies."""

    def __init__(self, tensor: torch.Tensor, copy_stream: torch.cuda.Stream | None = None) -> None:
        """Start the copy; the current stream does not wait. CUDA tensors need `copy_stream`."""
        if not tensor.is_cuda:
            self._arrival, self._values = None, async_copy_to_np(tensor)
            return
        # A blocking event: waiting threads sleep, as for vLLM's own outputs, and free the CPU.
        self._arrival = torch.cuda.Event(blocking=True)
        current = torch.cuda.current_stream(tensor.device)
        assert copy_stream is not None
        with stream(copy_stream, current):
            copy_stream.wait_stream(current)
            self._values = async_copy_to_np(tensor)
            self._arrival.record(copy_stream)

    def before_writing(self) -> None:
        """Make the current stream, not the host, wait until the tensor may be written again."""
        if self._arrival is not None:
            self._arrival.wait()

    def wait(self) -> np.ndarray:
        """Wait for the copy, and return the values."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values


class CountedOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step; counts the step's drafts when it is fetched."""

    def __init__(
        self,
        output: AsyncOutput,
        report: HostCopy,
        statistics: DraftStatistics,
        block_time: BlockTime | None = None,
    ) -> None:
        """Wrap an output.

        Args:
            output: vLLM's output of a step.
            report: the device's table of outcomes, [R, OUTCOME_COLUMNS + K].
            statistics: counts its drafts.
            block_time: time of the block of the step before; None: not to be sent.
        """
        self.model_runner_output = output.model_runner_output
        self._output, self._report, self._statistics = output, report, statistics
        self._block_time = block_time

    def get_output(self) -> ModelRunnerOutput:
        """Called by vLLM where it may block: in its own thread, or by the scheduler."""
        output, table = self._output.get_output(), self._report.wait()
        if table.size and table.min() < 0.0:  # rare
            self._statistics.nan_drafts += int((table[:, OUTCOME_COLUMNS:] < 0.0).sum())
        produced = [*map(len, output.sampled_token_ids)]
        # Placeholders, and requests without drafts, count as 0 verified drafts.
        self._statistics.count_verified(output.req_ids, produced, verified_drafts(table))
        OUTCOMES.attach(output, table)
        if self._block_time is not None:  # the table has arrived, which was copied behind it
            BLOCK_SECONDS.attach(output, self._block_time.seconds())
        return output

    def get_kv_connector_output(self) -> Any:
        """Called by vLLM 0.33 for an output that failed."""
        return self.model_runner_output.kv_connector_output
