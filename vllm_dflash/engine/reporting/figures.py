"""Sends figures about drafting to the API server, for Prometheus.

The planner of draft lengths counts: the first worker (V1), or the scheduler (V2) in the engine's
process. Once a second, and when the engine becomes idle, the increases are sent on:

    worker                        as an attribute of the step's `ModelRunnerOutput`, like drafts
    engine's process, scheduler   in the `SchedulerStats` that vLLM sends with every step
    API server                    `engine/reporting/prometheus.py` adds them to its counters

So they need no call of their own. Each message has the increases since the last one, and vLLM sends
a step's statistics to one API server only, so the counters of several servers add up.
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

from vllm_dflash.config.engine_options import uses_rust_front_end
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import (
    METRICS,
    UNIT,
    DraftStatistics,
    Figures,
    Increases,
)

INTERVAL = 1.0
"""Seconds between two messages of a busy engine."""
PREFIX = "vllm_dflash:"

FIGURES_SENT: Message[Figures] = Message("dflash_figures")
"""Increases, from worker to scheduler (V1)."""


class CountingScheduler(Scheduler):
    """vLLM's scheduler; sends the figures for `/metrics`. On V2 it counts them as well."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.statistics = DraftStatistics(self.num_spec_tokens)
        self._figures = Increases(self.statistics, INTERVAL, METRICS)
        self.verified_drafts: Mapping[str, int] | None = None
        """On V2: drafts of each request that the step being processed has verified, if workers have
        reported them. vLLM knows only how many were scheduled."""

    def count_drafts(self, verified: Mapping[str, int] | None) -> None:
        """Set the drafts that each request of a step has verified, before its output is processed.
        None: as many as were scheduled, which vLLM counts without a call of ours per request."""
        self.verified_drafts = verified
        if verified is None:
            self.make_spec_decoding_stats = super().make_spec_decoding_stats  # type: ignore[method-assign]
        else:
            self.__dict__.pop("make_spec_decoding_stats", None)

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a request's drafts, and not draft slots that stayed empty."""
        invalid = (num_invalid_spec_tokens or {}).get(request_id, 0)
        verified = (self.verified_drafts or {}).get(request_id, num_draft_tokens)
        counted = min(verified, num_draft_tokens - invalid)
        if not counted:  # vLLM would forget the other requests' drafts
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, counted, num_accepted_tokens, None, request_id
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Process the sampled tokens. Sends new figures to the API server with the outputs, if they
        are due or the engine becomes idle."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        is_busy = scheduler_output.total_num_scheduled_tokens > 0
        own = self._figures.tick() if is_busy else self._figures.take()
        if figures := (own or {}) | (FIGURES_SENT.on(model_runner_output) or {}):
            send_figures(outputs, figures)
        return outputs


def send_figures(outputs: Mapping[int, EngineCoreOutputs], figures: Figures) -> None:
    """Send a step's figures with its statistics, if it has any, in the engine's process (hook
    "figures").

    A front end reads only declared fields. Free-form ones for connectors would reach vLLM's
    connector code; this one, for LoRA, is read only by vLLM's Prometheus logger, after ours. The
    front end in Rust would not take these figures out again, so it gets none.
    """
    if uses_rust_front_end():
        return
    for output in outputs.values():
        if output.scheduler_stats is not None:
            fields = {PREFIX + name: more for name, more in figures.items()}
            output.scheduler_stats.running_lora_adapters.update(fields)
            return


def take_figures(stats: SchedulerStats) -> dict[str, float]:
    """Remove the figures that `send_figures` added, and return them. For the API server."""
    adapters = stats.running_lora_adapters
    if not adapters:
        return {}
    names = [name for name in adapters if name.startswith(PREFIX)]
    return {name.removeprefix(PREFIX): adapters.pop(name) * UNIT for name in names}
