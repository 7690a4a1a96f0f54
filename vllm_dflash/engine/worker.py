"""Where vLLM meets our drafting code in each worker process: what all of our workers share.

`v1/` and `v2/` have one for each model runner and platform, `cpu_worker.py` what those on CPUs
share. What they attach to a runner is numbered as on the page of hooks (`plugin.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias

from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_dflash import __version__
from vllm_dflash.checkpoint.pairing import describe_ranks
from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.compile_aside import CompileAside
from vllm_dflash.engine.estimates_file import EstimatesFile, EstimatesKeeper
from vllm_dflash.engine.reporting.log import DraftWatch, log_active, log_costs, logger
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.plugin import register_draft_model
from vllm_dflash.seams import Seams, check_vllm

Output: TypeAlias = ModelRunnerOutput | AsyncModelRunnerOutput
"""Output of a step on V1, and on V2, where its tokens are still to come."""


class Drafter(Protocol):
    """What stands in the place of vLLM's drafting code: our proposer (V1) or speculator (V2)."""

    spec: DrafterSpec
    model: DFlashDraftModel
    warm: WarmState
    statistics: DraftStatistics
    """What was counted so far."""

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""


class DraftingWorker(Worker):
    """What all of our workers add to vLLM's, from the start to the end of an engine."""

    seams: ClassVar[Seams]
    """What it relies on of vLLM's."""
    drafter: Drafter
    _ticking: tuple[Callable[[], object], ...] = ()
    """What is called when a step has ended."""
    _keeper: EstimatesKeeper | None = None
    _compiling: CompileAside | None = None
    _monitor_jit: Callable[[], None] = staticmethod(lambda: None)
    """What vLLM starts where it is done warming up; nothing on CPUs."""

    def attach(self) -> Drafter:
        """Put our drafting code into the model runner (hook 10)."""
        raise NotImplementedError

    def measure(self) -> StepCosts:
        """What steps cost, by dummy batches: the same calls on every rank."""
        raise NotImplementedError

    def start_planning(self, costs: StepCosts, file: EstimatesFile | None) -> None:
        """Plan from these costs, and from what an earlier engine has left in a file."""
        raise NotImplementedError

    def end_step(self, output: Output) -> Output:
        """A step has sampled and drafted; returns what the engine gets."""
        raise NotImplementedError

    # --- the start --------------------------------------------------------------------------

    def init_device(self) -> None:
        """Build the model runner, and put our drafting code in the place of vLLM's."""
        check_vllm(self.seams)
        register_draft_model()  # hook 6
        options = Mode.of(self.vllm_config)
        if options.is_planned:
            self._compiling = CompileAside(options.runner, starts=self.local_rank == 0)
        super().init_device()
        self.drafter = self.attach()
        if self.rank == 0:
            log_active(options)
            tp_size = self.parallel_config.tensor_parallel_size
            if tp_size > 1:
                about = describe_ranks(options.drafter, tp_size, options.drafter_ranks)
                logger().info("tensor parallelism: %s", about)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up, then measure what steps cost, for the planner to start from."""
        times = super().compile_or_warm_up_model()
        if Mode.of(self.vllm_config).is_planned:
            self._plan_lengths()
        self.start_counting()
        self.drafter.warm.seal()
        self._monitor_jit()
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """Later: what is profiled behind vLLM's warm-up may compile kernels, which the monitor
        warns of, or in mode "error" ends the engine for."""
        self._monitor_jit = super()._maybe_activate_jit_monitor

    def _plan_lengths(self) -> None:
        started = time.perf_counter()
        options = Mode.of(self.vllm_config)
        assert self._compiling is not None
        self._compiling.finish(options.draft_width, options.most_free)
        file = EstimatesFile.of(self.vllm_config)
        if file is not None and file.recalled is not None:
            costs, origin = file.recalled.costs, f"learned before, from {file.path}"
        else:
            with set_current_vllm_config(self.vllm_config):
                costs = self.measure()
            origin = f"measured in {time.perf_counter() - started:.1f} s"
        if self.rank == 0:
            log_costs(costs, origin)
        self.start_planning(costs, file)

    def start_counting(self) -> None:
        """From now on. vLLM's warm-up runs steps through this worker that are no user's."""
        self.drafter.statistics.clear()
        if self.rank != 0:
            return
        drafter = Mode.of(self.vllm_config).drafter.model
        statistics, target = self.drafter.statistics, self.model_config.model
        self._ticking = (DraftWatch(statistics, target=target, drafter=drafter).tick,)
        if self._keeper is not None:
            self._ticking += (self._keeper.tick,)

    # --- every step -------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target."""
        self.drafter.expect(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Output | None:
        """Sample and draft: the end of a step."""
        output = super().sample_tokens(grammar_output)
        if output is None:  # the step's first half failed, and vLLM says why
            return None
        output = self.end_step(output)
        for each in self._ticking:
            each()
        return output

    # --- weights that change ----------------------------------------------------------------

    def supports_draft_weight_updates(self) -> bool:
        """Ours does not: see below."""
        return False

    def _set_draft_weight_update_target(self) -> None:
        """Refuse new weights for the drafter, while nothing has changed.

        They would come in parts, behind vLLM's empty tensors. Ours are checked and made ready all
        at once: captured graphs read stacked K/V projections, which nobody would make anew.
        """
        raise RuntimeError(
            "vllm-dflash loads a drafter's weights once. To update the target alone, call"
            " start_weight_update; for another drafter, start the engine again with its folder as"
            " 'model' of the speculative config."
        )

    # --- the end ----------------------------------------------------------------------------

    def shutdown(self) -> None:
        """The engine ends: keep what was learned."""
        if self._compiling is not None:
            self._compiling.stop()
        if self._keeper is not None:
            self._keeper.close()
        super().shutdown()

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of this worker, as `LLM.collective_rpc("dflash_stats")` returns them.

        One for each rank, the first of which counts: it decides for all, by times it measured.
        """
        kind, options = type(self.drafter), Mode.of(self.vllm_config)
        return {
            "proposer": f"{kind.__module__}.{kind.__qualname__}",
            "rank": self.rank,
            "runner": options.runner,
            "block_size": self.drafter.spec.block_size,
            "draft_length": options.draft_length,
            **self.drafter.statistics.to_dict(),
            **self.drafter.warm.to_dict(),
        }


def expect_drafter(found: Any, kind: type) -> None:
    """Stop where the runner has built something else than what ours stands for."""
    if type(found) is not kind:
        raise RuntimeError(
            f"vllm-dflash {__version__} was selected, but the model runner built"
            f" {type(found).__module__}.{type(found).__qualname__} as its drafter. On a CPU,"
            " VLLM_USE_V2_MODEL_RUNNER=0 or 1 says which model runner there is to be."
        )
