"""Our counters at `/metrics`, in addition to vLLM's. Runs in the API server."""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import (
    AggregateStatLoggerBase,
    PrometheusStatLogger,
    StatLoggerManager,
)
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_dflash.config.engine_options import ADDITIONAL_CONFIG_KEY
from vllm_dflash.engine.reporting.figures import take_figures
from vllm_dflash.engine.reporting.statistics import COUNTERS, METRICS

METRIC = "vllm:dflash_{}"
"""Name of a counter. vLLM lists those that start with `vllm:`, and unregisters them when the
process builds another engine."""


class FigureLogger(AggregateStatLoggerBase):
    """Adds the figures that come with a step's statistics to Prometheus counters."""

    def __init__(
        self, vllm_config: VllmConfig, engine_indexes: list[int], beside: PrometheusStatLogger
    ) -> None:
        """Make the counters, with the labels and class of vLLM's own (Ray's under Ray Serve)."""
        labels = beside.per_engine_labelvalues
        self._counters = {
            name: create_metric_per_engine(
                beside._counter_cls(
                    name=METRIC.format(name),
                    documentation=COUNTERS[name],
                    labelnames=["model_name", "engine"],
                ),
                {index: labels[index] for index in engine_indexes},
            )
            for name in METRICS
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add the figures in a step's statistics; most steps have none."""
        if scheduler_stats is not None:
            for name, more in take_figures(scheduler_stats).items():
                self._counters[name][engine_idx].inc(more)

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def show_figures() -> None:
    """Add our counters in the front end (hook "figures"). Other engines here are unaffected."""
    original = StatLoggerManager.__init__
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return

    @functools.wraps(original)
    def __init__(
        self: StatLoggerManager, vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> None:
        original(self, vllm_config, *args, **kwargs)
        additional = vllm_config.additional_config
        if not isinstance(additional, dict) or ADDITIONAL_CONFIG_KEY not in additional:
            return
        vllms = next(one for one in self.stat_loggers if isinstance(one, PrometheusStatLogger))
        # Before vLLM's logger, which would take our figures for LoRA adapters.
        self.stat_loggers.insert(0, FigureLogger(vllm_config, self.engine_indexes, vllms))

    __init__.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    StatLoggerManager.__init__ = __init__
