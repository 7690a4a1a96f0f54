"""Workers for Model Runner V2, on which the device decides."""

from __future__ import annotations

from copy import copy
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.message import Message
from vllm_dflash.engine.reporting.log import log_free_drafts, log_lengths
from vllm_dflash.engine.v2.captured_lengths import capture_all_lengths
from vllm_dflash.engine.v2.drawing import sample_by_drawing
from vllm_dflash.engine.v2.exchange import CHAINS_ONLY, COUNTED, FACTS, WorkerFacts
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.v2_profile import (
    dummy_requests,
    lengths_to_choose,
    profile_v2,
    ragged_seconds,
)
from vllm_dflash.engine.vllm_fixes.undrafted_graphs import fix_undrafted_graphs
from vllm_dflash.engine.worker import DraftingWorker, Output, check_drafter_class
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.vllms_own import SWITCH_OFF

PROMPT_ROWS = (16, 32, 64, 128, 256)
"""Rows of a prompt and its block, rounded up: vLLM compiles for each of these. 256 is for more,
too."""


class V2Worker(DraftingWorker):
    """V2 worker for any platform."""

    model_runner: GPUModelRunner
    drafter: PlannedSpeculator
    _to_send: tuple[tuple[Message[Any], Any], ...] = ()
    """Messages for the next output, each with its content."""

    def attach(self) -> PlannedSpeculator:
        """Replace the runner's speculator (hook "drafter"), which keeps texts on the device."""
        runner = self.model_runner
        check_drafter_class(runner.speculator, DFlashSpeculator)
        if EngineOptions.from_config(self.vllm_config).captures_lengths:
            capture_all_lengths(runner)  # hook "captured lengths"
        runner.speculator = PlannedSpeculator(self.vllm_config, runner)
        return runner.speculator

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up and capture graphs."""
        draws = sample_by_drawing(self.model_runner)  # hook "drawing verifier"
        self.drafter.draws_drafts = draws and self.drafter.options.draws_drafts
        fix_undrafted_graphs(self.model_runner)
        self.drafter.before_capture(self.model_runner)  # hook "draft trees"
        took = super().compile_or_warm_up_model()
        # On GPUs, vLLM's warm-up decodes, and its drafts say nothing about users' drafts.
        self.drafter.slots.forget_all()
        # Set after warm-up: on GPUs it runs steps too, and nobody reads their output.
        trees = self.drafter.trees
        if trees is not None and not trees.is_attached:
            self._to_send += ((CHAINS_ONLY, True),)
        return took

    def measure(self) -> StepCosts:
        """Measure step costs with dummy batches."""
        return profile_v2(self.model_runner)

    def start_planning(self, costs: StepCosts) -> None:
        """Send the costs to the scheduler, which plans, with the first output."""
        facts = WorkerFacts(
            costs,
            lengths_to_choose(self.model_runner, self.drafter.options.draft_width),
            ragged_seconds=ragged_seconds(self.model_runner),
        )
        self._to_send += ((FACTS, facts),)
        if self.rank == 0:
            if self.drafter.free_drafts is not None:
                log_free_drafts(self.drafter.options)
            log_lengths(facts.lengths, facts.ragged_seconds)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Output | None:
        """Run the target. An engine that becomes idle is told what was counted."""
        output = super().execute_model(scheduler_output)
        if output is not None and not scheduler_output.total_num_scheduled_tokens:
            output = copy(output)  # vLLM has one for all such steps
            COUNTED.attach(output, self.drafter.read_counts())
        return output

    def dflash_stats(self) -> dict[str, Any]:
        """Counters of this worker."""
        self.drafter.read_counts()
        return super().dflash_stats()

    def end_step(self, output: Output) -> Output:
        """Attach messages to the output, and what became of the drafts if the plan wants it."""
        for message, content in self._to_send:
            message.attach(output.model_runner_output, content)
        self._to_send = ()
        return self.drafter.wrap_output(output)


class V2GPUWorker(V2Worker):
    """V2 worker for CUDA."""

    def init_device(self) -> None:
        """Build the model runner. Raises `ValueError` if it would be V1."""
        if not self.use_v2_model_runner:
            raise ValueError(
                "on CUDA, vllm-dflash supports Model Runner V2 only, and this configuration gets"
                " V1: unset VLLM_USE_V2_MODEL_RUNNER and leave out what V2 does not support yet"
                f" (vLLM's log names it). {SWITCH_OFF}."
            )
        super().init_device()

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up and capture graphs."""
        if self.vllm_config.kernel_config.enable_jit_warmup:
            self._warm_prompts()
        return super().compile_or_warm_up_model()

    def _warm_prompts(self) -> None:
        """Run a prompt of each length for which vLLM compiles a kernel of its own
        (`prepare_dflash_inputs`), so that no request waits for it."""
        runner = self.model_runner
        block_rows = self.drafter.num_query_per_req
        longest = min(runner.max_model_len, runner.max_num_tokens) - block_rows
        with dummy_requests(runner, 1):
            for tokens in sorted({min(size - block_rows, longest) for size in PROMPT_ROWS}):
                if tokens > 0:
                    runner._dummy_run(tokens, skip_eplb=True)
