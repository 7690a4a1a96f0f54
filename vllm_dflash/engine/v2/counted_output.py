"""What became of drafts that nobody waits for: counted when vLLM has the outcome on the host, and
sent to the scheduler with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.scheduled import have_own_drafts
from vllm_dflash.engine.v2.host_copy import HostCopy
from vllm_dflash.planning.ahead import NOBODY, TEXT, Outcomes
from vllm_dflash.planning.step import Step

OUTCOMES: Message[Outcomes] = Message("dflash_outcomes")
"""V2, worker to scheduler: of the output's requests, in its order."""


class VerifiedDrafts:
    """The drafts of a step that is under way."""

    def __init__(
        self, ids: Sequence[str], newly_admitted: Collection[str], outcomes: torch.Tensor
    ) -> None:
        """Of a batch of R requests, to be made before the block is launched.

        Args:
            ids: of the requests, [R].
            newly_admitted: those whose drafts in this step are vLLM's placeholders.
            outcomes: what the device saw, [R, 6 + K]; it may be written again.
        """
        self.ids = ids
        self._own = have_own_drafts(ids, newly_admitted)
        self._outcomes = HostCopy(outcomes.clone())

    def outcomes(self) -> Outcomes:
        """What the device saw. Waits for the target."""
        return Outcomes.of(self._outcomes.wait())

    def step(self, outcomes: Outcomes, sampled: Sequence[Sequence[int]]) -> Step:
        """What became of them, by the tokens that each request got."""
        step = Step(self.ids, np.array([len(tokens) for tokens in sampled]))
        own = self._own & (outcomes.source != NOBODY)
        step.verified = np.where(own, outcomes.admitted, 0)
        step.verified_free = np.where(outcomes.source == TEXT, step.verified, 0)
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
        outcomes = self._drafts.outcomes()
        step = self._drafts.step(outcomes, output.sampled_token_ids)
        self._statistics.observe_verification(step)
        OUTCOMES.attach(output, outcomes)
        return output

    def get_kv_connector_output(self) -> Any:
        """Called by vLLM 0.33 for an output that failed."""
        return self.model_runner_output.kv_connector_output
