"""vLLM's scheduler, which also finds the drafts in a step's output."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_dflash import plugin

DRAFTS = "dflash_draft_token_ids"


def attach_drafts(output: ModelRunnerOutput, drafts: DraftTokenIds | None) -> None:
    """In a worker: send the drafts along with the sampled tokens."""
    setattr(output, DRAFTS, drafts)


class DFlashScheduler(Scheduler):
    """Takes drafts from where `attach_drafts` put them.

    vLLM asks the workers for drafts in a call of its own after every step, which between
    processes takes longer than planning and skipping a draft does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plugin.spare_the_call_for_drafts()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens, then the drafts, in the order vLLM does."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        drafts = getattr(model_runner_output, DRAFTS, None)
        if drafts is not None:
            self.update_draft_token_ids(drafts)
        return outputs
