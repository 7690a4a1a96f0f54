"""Figures of drafting on their way to Prometheus: from who counts them to the API server.

Who plans draft lengths counts: the first worker (V1), or the scheduler (V2) in the engine's
process. Once a second, and when the engine runs dry, what is new travels:

    worker                        as an attribute of the step's `ModelRunnerOutput`, like drafts
    engine's process, scheduler   in the `SchedulerStats` that vLLM sends with every step
    API server                    `engine/reporting/prometheus.py` adds it to its counters

So no call is made for them. Each message is what came since the last, and vLLM hands a step's
statistics to one API server only: the counters of several add up. Free drafts are counted by
schedulers (`counting_scheduler.py`), because vLLM's own counters are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.statistics import COUNTERS, METRICS, DraftStatistics

INTERVAL = 1.0
"""Seconds between two messages of an engine that is busy."""
UNIT = 1e-6
"""Of the figures under way: vLLM's statistics have room for whole numbers only."""
PREFIX = "vllm_dflash:"
FREE = ("free_draft_tokens", "free_accepted_tokens")
"""What schedulers count."""
OF_WORKERS = [name for name in METRICS if name not in FREE]

Figures = dict[str, int]
"""Increase of each counter that increased, in `UNIT`."""
FIGURES_SENT: Message[Figures] = Message("dflash_figures")
"""V1, worker to scheduler."""
FREE_DRAFTS: Message[Mapping[str, int]] = Message("dflash_free_drafts")
"""V1, worker to scheduler: free drafts that the step has verified, of requests that had any."""


class Increases:
    """What counters have grown by: asked for as steps end, told once in an interval."""

    def __init__(
        self,
        statistics: DraftStatistics,
        interval: float,
        names: Collection[str] = tuple(COUNTERS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing was told of these so far; `interval` in seconds."""
        self._statistics, self._interval, self._clock = statistics, interval, clock
        self._due = clock() + interval
        self._told = dict.fromkeys(names, 0)

    def tick(self) -> Figures | None:
        """A step has ended: what is new, if it is time to tell."""
        return None if self._clock() < self._due else self.take()

    def take(self) -> Figures:
        """All of it. For the step without tokens with which vLLM ends every stretch of work."""
        self._due = self._clock() + self._interval
        counts = self._statistics.counts()
        now = {name: round(counts[name] / UNIT) for name in self._told}
        fresh = {name: more for name in now if (more := now[name] - self._told[name]) > 0}
        self._told = now
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
