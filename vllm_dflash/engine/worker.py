"""Base of our workers, which connect vLLM to our drafting code in each worker process.

`v1/` and `v2/` have a worker for each model runner and platform; `cpu_worker.py` has what the CPU
workers share. Names of hooks are those of `plugin.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_dflash import __version__
from vllm_dflash.checkpoint.pairing import describe_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.reporting.log import (
    DraftWatch,
    log_active,
    log_costs,
    log_gpu_figures,
    logger,
)
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.model.registration import register_draft_model
from vllm_dflash.planning.costs import StepCosts

Output: TypeAlias = ModelRunnerOutput | AsyncModelRunnerOutput
"""Output of a step: on V1 with its tokens, on V2 possibly before they have been computed."""


class Drafter(Protocol):
    """Replacement for vLLM's drafting code: our proposer (V1) or speculator (V2)."""

    spec: DrafterSpec
    model: DFlashDraftModel
    warm: WarmState
    statistics: DraftStatistics
    """Counters since the engine started."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Prepare for a step that is about to run."""


class DraftingWorker(Worker):
    """Base of all our workers: what they add to vLLM's, from start-up to shutdown."""

    drafter: Drafter
    _ticking: tuple[Callable[[], object], ...] = ()
    """Functions to call after each step."""
    _monitor_jit: Callable[[], None] = staticmethod(lambda: None)
    """Starts vLLM's JIT monitor after warm-up; does nothing on CPUs."""

    def attach(self) -> Drafter:
        """Install our drafting code in the model runner (hook "drafter")."""
        raise NotImplementedError

    def measure(self) -> StepCosts:
        """Measure what steps cost, with dummy batches. Every rank makes the same calls."""
        raise NotImplementedError

    def start_planning(self, costs: StepCosts) -> None:
        """Start planning from these costs."""
        raise NotImplementedError

    def end_step(self, output: Output) -> Output:
        """Finish a step after sampling and drafting. Returns the output for the engine."""
        raise NotImplementedError

    # --- the start --------------------------------------------------------------------------

    def init_device(self) -> None:
        """Build the model runner, and replace vLLM's drafting code with ours."""
        register_draft_model()
        options = EngineOptions.from_config(self.vllm_config)
        super().init_device()
        self.drafter = self.attach()
        if self.rank == 0:
            log_active(options)
            log_gpu_figures()
            tp_size = self.parallel_config.tensor_parallel_size
            if tp_size > 1:
                about = describe_ranks(options.drafter, tp_size, options.drafter_ranks)
                logger().info("tensor parallelism: %s", about)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up, then measure the step costs that the planner starts from."""
        times = super().compile_or_warm_up_model()
        if EngineOptions.from_config(self.vllm_config).is_planned:
            self._plan_lengths()
        self.start_counting()
        self.drafter.warm.seal()
        self._monitor_jit()
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """Postpone the monitor: profiling after vLLM's warm-up may compile kernels, and the monitor
        would warn of them, or in mode "error" end the engine."""
        self._monitor_jit = super()._maybe_activate_jit_monitor

    def _plan_lengths(self) -> None:
        started = time.perf_counter()
        with set_current_vllm_config(self.vllm_config):
            costs = self.measure()
        if self.rank == 0:
            log_costs(costs, time.perf_counter() - started)
        self.start_planning(costs)

    def start_counting(self) -> None:
        """Reset the counters: vLLM's warm-up has run steps in this worker that serve no user."""
        self.drafter.statistics.clear()
        if self.rank != 0:
            return
        drafter = EngineOptions.from_config(self.vllm_config).drafter
        statistics, target = self.drafter.statistics, self.model_config.model
        self._ticking = (DraftWatch(statistics, target=target, drafter=drafter).tick,)

    # --- every step -------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target."""
        self.drafter.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Output | None:
        """Sample and draft: the second half of a step."""
        output = super().sample_tokens(grammar_output)
        if output is None:  # the step's first half failed, and vLLM reports why
            return None
        output = self.end_step(output)
        for each in self._ticking:
            each()
        return output

    # --- weights that change ----------------------------------------------------------------

    def supports_draft_weight_updates(self) -> bool:
        """No: `_set_draft_weight_update_target` says why."""
        return False

    def _set_draft_weight_update_target(self) -> None:
        """Refuse new weights for the drafter, before anything has changed.

        They would arrive in parts, into vLLM's empty tensors. Our drafter checks and prepares its
        weights all at once: captured graphs read stacked K/V projections, which no code would
        rebuild.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "vllm-dflash loads a drafter's weights once. To update the target alone, call"
            " start_weight_update; for another drafter, start the engine again with its folder as"
            " 'model' of the speculative config."
        )

    # --- the end ----------------------------------------------------------------------------

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of this worker, as `LLM.collective_rpc("dflash_stats")` returns them.

        Each rank returns its own. Read rank 0's: on V1 it decides for all ranks, from its own
        times. On V2 the scheduler decides; its times and probes arrive every 32 steps.
        """
        kind, options = type(self.drafter), EngineOptions.from_config(self.vllm_config)
        return {
            "proposer": f"{kind.__module__}.{kind.__qualname__}",
            "rank": self.rank,
            "runner": options.runner,
            "block_size": self.drafter.spec.block_size,
            "draft_length": options.draft_length,
            **self.drafter.statistics.to_dict(),
            **self.drafter.warm.to_dict(),
        }


def check_drafter_class(found: Any, kind: type) -> None:
    """Raise `RuntimeError` unless the runner built the drafter that ours replaces."""
    if type(found) is not kind:
        raise RuntimeError(
            f"vllm-dflash {__version__} was selected, but the model runner built"
            f" {type(found).__module__}.{type(found).__qualname__} as its drafter. On a CPU,"
            " VLLM_USE_V2_MODEL_RUNNER=0 or 1 says which model runner there is to be."
        )
