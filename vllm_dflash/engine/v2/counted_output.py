"""What became of drafts that nobody waits for: counted when vLLM has the outcome on the host, and
sent to the scheduler with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput, async_copy_to_np

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v2.exchange import OUTCOMES, free_ones
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS
from vllm_dflash.planning.ahead import Outcomes
from vllm_dflash.planning.step import Step


class HostCopy:
    """A tensor on its way to the host: as it is when this is made, whatever is launched behind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = async_copy_to_np(tensor)
        self._arrival = torch.cuda.current_stream().record_event() if tensor.is_cuda else None

    def wait(self) -> np.ndarray:
        """Its values, once all that was launched before is done."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values


class CountedOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step, which counts the step's drafts when it is fetched."""

    def __init__(self, output: AsyncOutput, report: HostCopy, statistics: DraftStatistics) -> None:
        """`report` is what the device saw of the drafts, [R, OUTCOME_COLUMNS + K]."""
        self.model_runner_output = output.model_runner_output
        self._output, self._report, self._statistics = output, report, statistics

    def get_output(self) -> ModelRunnerOutput:
        """Called by vLLM where it may wait: in a thread of its own, or by the scheduler."""
        output, table = self._output.get_output(), self._report.wait()
        self._statistics.nan_drafts += int((table[:, OUTCOME_COLUMNS:] < 0.0).sum())
        outcomes = Outcomes.of(np.maximum(table, 0.0))
        step = Step(
            output.req_ids,
            np.array([len(tokens) for tokens in output.sampled_token_ids]),
            verified=outcomes.admitted,  # 0 of placeholders, and where nobody had a draft
            verified_free=free_ones(outcomes),
        )
        self._statistics.observe_verification(step)
        OUTCOMES.attach(output, outcomes)
        return output

    def get_kv_connector_output(self) -> Any:
        """Called by vLLM 0.33 for an output that failed."""
        return self.model_runner_output.kv_connector_output
