"""Figures of drafting on their way to Prometheus: from who counts them to the API server.

Who plans draft lengths counts: the first worker (V1), or the scheduler (V2) in the engine's
process. Once a second, and when the engine runs dry, what is new travels:

    worker                        as an attribute of the step's `ModelRunnerOutput`, like drafts
    engine's process, scheduler   in the `SchedulerStats` that vLLM sends with every step
    API server                    `engine/reporting/prometheus.py` adds it to its counters

So no call is made for them. Each message is what came since the last, and vLLM hands a step's
statistics to one API server only: the counters of several add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import DraftStatistics

FIGURES = {
    "drafted_steps": "Steps in which the drafter ran.",
    "skipped_steps": "Steps in which drafts could have been used and the drafter did not run.",
    "drafted_requests": "Requests of drafted steps whose draft length was chosen, 0 included.",
    "planned_tokens": "Sum of the draft lengths chosen for dflash_drafted_requests.",
    "free_draft_tokens": "Verified drafts that came from a request's own text.",
    "free_accepted_tokens": "Of those, drafts that were accepted.",
    "step_seconds": "Time of all steps that followed another without a pause.",
    "planning_seconds": "Time spent on choosing draft lengths.",
    "produced_tokens": "Tokens of the steps that the cost model was compared with.",
    "expected_tokens": "Tokens that the planner expected of those steps.",
    "plain_tokens": "Tokens that plain decoding makes in the same time, by the cost model.",
}
"""What `DraftStatistics.figures` gives, and what each is, for Prometheus."""
INTERVAL = 1.0
"""Seconds between two messages of an engine that is busy."""
UNIT = 1e-6
"""Of the figures under way: vLLM's statistics have room for whole numbers only."""

PREFIX = "vllm_dflash:"

Figures = dict[str, int]
"""Increase of each figure that increased, in `UNIT`."""
FIGURES_SENT: Message[Figures] = Message("dflash_figures")
"""V1, worker to scheduler."""


class FiguresToSend:
    """What was counted and not sent yet."""

    def __init__(
        self, statistics: DraftStatistics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Nothing was sent of these so far."""
        self._statistics = statistics
        self._clock = clock
        self._due = clock() + INTERVAL
        self._sent = dict.fromkeys(FIGURES, 0)

    def tick(self) -> Figures:
        """A step has ended: what is to be sent with it, mostly nothing."""
        return {} if self._clock() < self._due else self.take()

    def take(self) -> Figures:
        """All of it. For the step without tokens with which vLLM ends every stretch of work."""
        self._due = self._clock() + INTERVAL
        counted = {name: round(value / UNIT) for name, value in self._statistics.figures().items()}
        fresh = {name: more for name in FIGURES if (more := counted[name] - self._sent[name]) > 0}
        self._sent.update((name, counted[name]) for name in fresh)
        return fresh


def send_figures(outputs: Mapping[int, EngineCoreOutputs], figures: Figures) -> None:
    """In the engine's process: send them with the statistics of a step, if it has any (hook 18).

    The front end reads declared fields only. The free ones that are for connectors reach vLLM's
    code for connectors; this one is for LoRA, which our drafter excludes, and is read for nothing
    else.
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
