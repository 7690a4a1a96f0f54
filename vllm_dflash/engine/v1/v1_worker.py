"""Our worker with Model Runner V1, where the host plans."""

from __future__ import annotations

from copy import copy

from vllm import envs
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.cpu_worker import DraftingCPUWorker
from vllm_dflash.engine.reporting.figures import FIGURES_SENT, INTERVAL
from vllm_dflash.engine.reporting.log import PeriodicLog, log_free_drafts
from vllm_dflash.engine.reporting.statistics import METRICS, Increases
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v1.v1_fixes.aligned_states import fix_aligned_states
from vllm_dflash.engine.v1.v1_fixes.expanded_sampling import fix_expanded_sampling
from vllm_dflash.engine.v1.v1_fixes.rejection_sampling import DraftRejectionSampler
from vllm_dflash.engine.v1.v1_fixes.short_draft_states import fix_short_draft_states
from vllm_dflash.engine.v1.v1_fixes.thinking_budgets import fix_thinking_budgets
from vllm_dflash.engine.v1.v1_profile import profile_v1
from vllm_dflash.engine.v1.v1_scheduler import DRAFTS, sends_drafts_with_output
from vllm_dflash.engine.worker import Output, check_drafter_class
from vllm_dflash.planning.costs import StepCosts


class V1CPUWorker(DraftingCPUWorker):
    """V1 worker for CPUs, the only platform where our code runs on V1."""

    model_runner: GPUModelRunner
    drafter: PlannedProposer
    _figures: Increases | None = None

    def attach(self) -> PlannedProposer:
        """Install our proposer and rejection sampler, and fix V1's bugs (hooks "drafter", "context
        limit" and "fixes")."""
        runner = self.model_runner
        check_drafter_class(getattr(runner, "drafter", None), DFlashProposer)
        runner.drafter = PlannedProposer(self.vllm_config, self.device, runner)
        runner.rejection_sampler = DraftRejectionSampler(
            runner.sampler, runner.speculative_config, runner.device
        )
        fix_expanded_sampling()
        fix_thinking_budgets()
        if self.model_config.is_hybrid:
            fix_short_draft_states()
            fix_aligned_states()
        # Each request's own limit is kept by the proposer.
        runner._input_fits_in_drafter = lambda metadata: metadata is not None
        return runner.drafter

    def measure(self) -> StepCosts:
        """Measure what steps cost, with dummy batches."""
        return profile_v1(self.model_runner)

    def start_planning(self, costs: StepCosts) -> None:
        """Start planning in the proposer."""
        self.drafter.start_planning(costs)
        if self.rank == 0 and self.drafter.options.free_drafts:
            log_free_drafts(self.drafter.options)

    def start_counting(self) -> None:
        """Reset the counters; rank 0 also reports to the log and to `/metrics`."""
        super().start_counting()
        if self.rank != 0:
            return
        statistics = self.drafter.statistics
        self._figures = Increases(statistics, INTERVAL, METRICS)
        if self.drafter.options.is_planned:
            log = PeriodicLog(statistics, envs.VLLM_LOG_STATS_INTERVAL)
            self._ticking += (log.tick,)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target, and also sample and draft unless a request has a grammar.

        This saves the engine a call, which takes a while between processes. If no request has a
        token, send the remaining figures.
        """
        output = super().execute_model(scheduler_output)
        if output is None and not scheduler_output.has_structured_output_requests:
            return self.sample_tokens(None)
        if self._figures is not None and isinstance(output, ModelRunnerOutput):
            output = copy(output)  # vLLM shares the one without tokens
            FIGURES_SENT.attach(output, self._figures.take())
        return output

    def end_step(self, output: Output) -> Output:
        """Attach drafts to the output, and figures if they are due."""
        step = self.drafter.record
        has_drafts = step is not None and step.lengths.any()
        if has_drafts and sends_drafts_with_output(self.vllm_config):
            DRAFTS.attach(output, self.take_draft_token_ids())
        self.drafter.end_step()
        if self._figures is not None and (figures := self._figures.tick()):
            FIGURES_SENT.attach(output, figures)
        return output
