"""Figures of drafting on their way to Prometheus: from who counts them to the API server.

Who plans draft lengths counts: the first worker (V1), or the scheduler (V2) in the engine's
process. Once a second, and when the engine runs dry, what is new travels:

    worker                        as an attribute of the step's `ModelRunnerOutput`, like drafts
    engine's process, scheduler   in the `SchedulerStats` that vLLM sends with every step
    API server                    `engine/reporting/prometheus.py` adds it to its counters

So no call is made for them. Each message is what came since the last, and vLLM hands a step's
statistics to one API server only: the counters of several add up. Free drafts are counted by
schedulers, because vLLM's own counters are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import (
    METRICS,
    UNIT,
    DraftStatistics,
    Figures,
    Increases,
)

INTERVAL = 1.0
"""Seconds between two messages of an engine that is busy."""
PREFIX = "vllm_dflash:"
FREE = ("free_draft_tokens", "free_accepted_tokens")
"""What schedulers count."""
OF_WORKERS = [name for name in METRICS if name not in FREE]

FIGURES_SENT: Message[Figures] = Message("dflash_figures")
"""V1, worker to scheduler."""
FREE_DRAFTS: Message[Mapping[str, int]] = Message("dflash_free_drafts")
"""V1, worker to scheduler: free drafts that the step has verified, of requests that had any."""


class CountingScheduler(Scheduler):
    """vLLM's, which counts and sends what is shown at `/metrics`, on both runners."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics = DraftStatistics(self.num_spec_tokens)
        self._figures = Increases(self.statistics, INTERVAL, METRICS)
        self.free_drafts: Mapping[str, int] = {}
        """That the step whose output is taken has verified, of requests that had any."""

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """vLLM counts the drafts of a request, and we the free ones among them: not those of one
        that was aborted meanwhile, so that no more free drafts are accepted than drafts."""
        if verified := self.free_drafts.get(request_id, 0):
            self.statistics.free_draft_tokens += verified
            self.statistics.free_accepted_tokens += num_accepted_tokens
        counts = num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens
        return super().make_spec_decoding_stats(spec_decoding_stats, *counts, request_id)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the sampled tokens. What is new goes with them to the API server, if it is time to,
        or all of it if the engine runs dry."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        is_busy = scheduler_output.total_num_scheduled_tokens > 0
        own = self._figures.tick() if is_busy else self._figures.take()
        if figures := (own or {}) | (FIGURES_SENT.on(model_runner_output) or {}):
            send_figures(outputs, figures)
        return outputs


def send_figures(outputs: Mapping[int, EngineCoreOutputs], figures: Figures) -> None:
    """In the engine's process: send them with the statistics of a step, if it has any (hook 17).

    The front end reads declared fields only. The free ones that are for connectors reach vLLM's
    code for connectors; this one, for LoRA, is read by its Prometheus logger alone, behind ours.
    """
    for output in outputs.values():
        if output.scheduler_stats is not None:
            fields = {PREFIX + name: more for name, more in figures.items()}
            output.scheduler_stats.running_lora_adapters.update(fields)
            return


def take_figures(stats: SchedulerStats) -> dict[str, float]:
    """In the API server: what `send_figures` put there, which is there no longer."""
    adapters = stats.running_lora_adapters
    if not adapters:
        return {}
    names = [name for name in adapters if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): adapters.pop(name) * UNIT for name in names}
