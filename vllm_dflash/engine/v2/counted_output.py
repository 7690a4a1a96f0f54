"""What became of drafts that nobody waits for: counted when vLLM has the outcome on the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.engine.padding import have_own_drafts
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v2.host_copy import HostCopy
from vllm_dflash.planning.step import Step


class VerifiedDrafts:
    """The drafts of a step that is under way."""

    def __init__(
        self,
        batch: InputBatch,
        newly_admitted: Collection[str],
        trimmed_rejected: torch.Tensor | None,
    ) -> None:
        """Of a batch of R requests, to be made before the block is launched.

        Args:
            batch: vLLM's.
            newly_admitted: requests whose drafts in this step are vLLM's placeholders.
            trimmed_rejected: drafts that each lost after verification, [R] on the device, where
                that is not what was scheduled without what was accepted: the device drops some.
        """
        self.ids: Sequence[str] = batch.req_ids
        self._scheduled = batch.num_draft_tokens_per_req
        self._own = have_own_drafts(self.ids, newly_admitted)
        self._rejected = None if trimmed_rejected is None else HostCopy(trimmed_rejected)

    def step(self, sampled: Sequence[Sequence[int]]) -> Step:
        """What became of them, by the tokens that each request got. Waits for the target."""
        step = Step(self.ids, np.array([len(tokens) for tokens in sampled]))
        if self._rejected is not None:
            step.verified = np.maximum(step.produced - 1, 0) + self._rejected.wait()
        elif self._scheduled is not None:
            step.verified = self._scheduled
        step.verified = step.verified * self._own
        return step


class CountedOutput(AsyncModelRunnerOutput):
    """vLLM's output of a step, which counts the step's drafts when it is fetched."""

    def __init__(
        self, output: AsyncOutput, drafts: VerifiedDrafts, statistics: DraftStatistics
    ) -> None:
        self.model_runner_output = output.model_runner_output
        self._output, self._drafts, self._statistics = output, drafts, statistics

    def get_output(self) -> ModelRunnerOutput:
        """Called by vLLM where it may wait: in a thread of its own, or by the scheduler."""
        output = self._output.get_output()
        self._statistics.observe_verification(self._drafts.step(output.sampled_token_ids))
        return output

    def get_kv_connector_output(self) -> Any:
        """Called by vLLM 0.33 for an output that failed."""
        return self.model_runner_output.kv_connector_output
