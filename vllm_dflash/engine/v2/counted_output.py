"""What became of drafts that nobody waits for: counted when vLLM has the outcome on the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dflash.engine.padding import have_own_drafts
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.planning import Ints
from vllm_dflash.planning.step import Step


class VerifiedDrafts:
    """The drafts of a step, as far as the host knows before the step has run."""

    def __init__(self, batch: InputBatch, newly_admitted: Collection[str]) -> None:
        """Drafts of the requests that were admitted with this step are vLLM's placeholders."""
        self.ids: Sequence[str] = batch.req_ids
        drafts = batch.num_draft_tokens_per_req
        if drafts is None:
            drafts = np.zeros(len(self.ids), dtype=np.int32)
        self.lengths: Ints = drafts * have_own_drafts(self.ids, newly_admitted)
        """As scheduled, [R]."""
        self.trimmed = int(drafts.sum()) - batch.num_draft_tokens
        """Of them all, those that the device drops before they are verified."""


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
        drafts = self._drafts
        step = Step(drafts.ids, np.array([len(tokens) for tokens in output.sampled_token_ids]))
        step.verified = drafts.lengths
        self._statistics.observe_verification(step, trimmed=drafts.trimmed)
        return output
