"""Worker classes: where vLLM meets our drafting code in each worker process.

What they attach to a model runner is numbered as on the page of hooks (`plugin.py`).
"""

from __future__ import annotations

import time
from copy import copy
from typing import Any

from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from vllm_dflash import __version__
from vllm_dflash.checkpoint.ranks import describe_ranks
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.vllms_log import filter_vllms_warnings
from vllm_dflash.engine.agreement import agreed_seconds
from vllm_dflash.engine.compile_aside import CompileAside
from vllm_dflash.engine.drafts_in_output import attach_drafts, drafts_come_with_the_output
from vllm_dflash.engine.estimates_file import EstimatesKeeper, Memory
from vllm_dflash.engine.fresh_blocks import fresh_blocks, useless_blocks
from vllm_dflash.engine.profile import profile_v1, profile_v2, ragged_seconds
from vllm_dflash.engine.reporting.figures import FiguresToSend, attach_figures
from vllm_dflash.engine.reporting.log import log_active, log_costs, log_free_drafts, logger
from vllm_dflash.engine.reporting.periodic_log import PeriodicLog
from vllm_dflash.engine.reporting.watch import DraftWatch
from vllm_dflash.engine.v1.attach_trees import attach_trees
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.trimming import lengths_to_choose
from vllm_dflash.engine.v2.worker_facts import WorkerFacts, attach_facts, log_lengths
from vllm_dflash.engine.vllm_fixes.amx_permission import ask_for_amx
from vllm_dflash.engine.vllm_fixes.collective_memory import unlink_collective_memory
from vllm_dflash.engine.vllm_fixes.expanded_sampling import mend_expanded_sampling
from vllm_dflash.engine.vllm_fixes.seeded_chunks import seeds_kept
from vllm_dflash.engine.vllm_fixes.sliding_sinks import mend_sliding_sinks
from vllm_dflash.engine.vllm_fixes.stale_blocks import clear_blocks
from vllm_dflash.engine.vllm_fixes.undrafted_sampling import DraftRejectionSampler
from vllm_dflash.plugin import register_draft_model
from vllm_dflash.seams import V1_WORKER, V2_WORKER, check_vllm
from vllm_dflash.vllms_own import SWITCH_OFF


class DraftingWorker(Worker):
    """What both platforms' workers add to vLLM's."""

    drafter: Any
    """Our proposer (V1) or speculator (V2)."""
    _keeper: EstimatesKeeper | None = None
    _compiling: CompileAside | None = None

    def init_device(self) -> None:
        """Build the model runner, and put our drafting code in the place of vLLM's."""
        self._log: PeriodicLog | None = None
        self._watch: DraftWatch | None = None
        self._facts_to_send: WorkerFacts | None = None
        self._figures: FiguresToSend | None = None
        check_vllm(V2_WORKER if self.use_v2_model_runner else V1_WORKER)
        register_draft_model()  # hook 6
        filter_vllms_warnings()  # hook 21
        if DFlashOptions.of(self.vllm_config).draft_length == "adaptive":
            self._compiling = CompileAside(self._runner, starts=self.local_rank == 0)
        super().init_device()
        self.drafter = self._attach_to_v2() if self.use_v2_model_runner else self._attach_to_v1()
        if self.rank == 0:
            options = DFlashOptions.of(self.vllm_config)
            log_active(options, runner=self._runner)
            tp_size = self.parallel_config.tensor_parallel_size
            if tp_size > 1:
                about = describe_ranks(options.drafter, tp_size, options.drafter_ranks)
                logger().info("tensor parallelism: %s", about)

    @property
    def _runner(self) -> str:
        return "v2" if self.use_v2_model_runner else "v1"

    def _attach_to_v1(self) -> PlannedProposer:
        """Hooks 10, 11 and 20."""
        runner = self.model_runner
        _expect(getattr(runner, "drafter", None), DFlashProposer)
        runner.drafter = PlannedProposer(self.vllm_config, self.device, runner)
        runner.rejection_sampler = DraftRejectionSampler(
            runner.sampler, runner.speculative_config, runner.device
        )
        # Each request's own limit is kept by the proposer.
        runner._input_fits_in_drafter = lambda metadata: metadata is not None
        return runner.drafter

    def _attach_to_v2(self) -> PlannedSpeculator:
        """Hook 10."""
        runner = self.model_runner
        _expect(runner.speculator, DFlashSpeculator)
        runner.speculator = PlannedSpeculator(self.vllm_config, self.device, runner.req_states)
        return runner.speculator

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Warm up, then measure what steps cost, for the planner to start from."""
        if self.use_v2_model_runner:
            self.drafter.before_capture(self.model_runner)  # hook 18
        times = super().compile_or_warm_up_model()
        if DFlashOptions.of(self.vllm_config).draft_length == "adaptive":
            self._plan_lengths()
        if not self.use_v2_model_runner:
            attach_trees(self.drafter)  # hook 12
        self._start_counting()
        self.drafter.warm.seal()
        return times

    def _start_counting(self) -> None:
        """From now on. vLLM's warm-up runs steps through this worker that are no user's."""
        options = DFlashOptions.of(self.vllm_config)
        self.drafter.clear_statistics()
        statistics = self.drafter.collect_statistics(waits=False)
        if self.rank != 0:
            return
        if options.draft_length == "adaptive":
            self._log = PeriodicLog(statistics, envs.VLLM_LOG_STATS_INTERVAL, logger().info)
        if not self.use_v2_model_runner:  # there the scheduler counts
            self._figures = FiguresToSend(statistics)
        self._watch = DraftWatch(
            lambda: self.drafter.collect_statistics(waits=False),
            logger().warning,
            target=self.model_config.model,
            drafter=options.drafter.model,
        )

    def _plan_lengths(self) -> None:
        started = time.perf_counter()
        options = DFlashOptions.of(self.vllm_config)
        assert self._compiling is not None
        self._compiling.finish(options.draft_width, options.most_free)
        memory = Memory.of(self.vllm_config, self._runner)
        if memory is not None and memory.recalled is not None:
            costs, origin = memory.recalled.costs, f"learned before, from {memory.file.path}"
        else:
            profile = profile_v2 if self.use_v2_model_runner else profile_v1
            with set_current_vllm_config(self.vllm_config):
                costs = profile(self.model_runner, agreed_seconds)
            origin = f"measured in {time.perf_counter() - started:.1f} s"
        self.drafter.adapt_lengths(costs)
        if self.use_v2_model_runner:
            self._facts_to_send = WorkerFacts(
                costs,
                lengths_to_choose(self.model_runner),
                trims=self.drafter.budget is not None,
                ragged_seconds=ragged_seconds(self.model_runner, agreed_seconds),
                looks_up=self.drafter.texts is not None,
                memory=memory,
            )
        elif memory is not None:
            keeper = memory.attend(self.drafter.lengths.policy)
            self._keeper = keeper if self.rank == 0 else None
        if self.rank == 0:
            log_costs(costs, origin)
            if self.drafter.texts is not None:
                log_free_drafts(options.most_free, shares_outputs=options.shares_outputs)
            if self._facts_to_send is not None:
                log_lengths(self._facts_to_send, self.drafter.untrimmed)

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run the target, unless no request has a token: then send what figures are left."""
        self.drafter.expect(scheduler_output)
        output = super().execute_model(scheduler_output)
        if self._figures is not None and isinstance(output, ModelRunnerOutput):
            output = copy(output)  # vLLM shares the one without tokens
            attach_figures(output, self._figures.take())
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Sample and draft: the end of a step."""
        output = super().sample_tokens(grammar_output)
        if output is None:  # the step's first half failed, and vLLM says why
            return None
        if self.use_v2_model_runner:
            if self._facts_to_send is not None:
                attach_facts(output.model_runner_output, self._facts_to_send)
                self._facts_to_send = None
            output = self.drafter.counted(output)
        else:
            if self.drafter.has_drafts and drafts_come_with_the_output(self.vllm_config):
                attach_drafts(output, self.take_draft_token_ids())
            self.drafter.end_step()
        for each in (self._watch, self._log, self._keeper):
            if each is not None:
                each.tick()
        if self._figures is not None and (figures := self._figures.tick()):
            attach_figures(getattr(output, "model_runner_output", output), figures)
        return output

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
        kind = type(self.drafter)
        return {
            "proposer": f"{kind.__module__}.{kind.__qualname__}",
            "rank": self.rank,
            "runner": self._runner,
            "block_size": self.drafter.spec.block_size,
            "draft_length": DFlashOptions.of(self.vllm_config).draft_length,
            **self.drafter.collect_statistics().to_dict(),
            **self.drafter.warm.to_dict(),
        }


def _expect(drafter: Any, kind: type) -> None:
    """Stop where the runner has built something else than what ours stands for."""
    if type(drafter) is not kind:
        raise RuntimeError(
            f"vllm-dflash {__version__} was selected, but the model runner built"
            f" {type(drafter).__module__}.{type(drafter).__qualname__} as its drafter."
        )


class DFlashCPUWorker(DraftingWorker, CPUWorker):
    """vLLM's CPU worker with our drafting code in its model runner."""

    def init_device(self) -> None:
        """Mend what this vLLM's CPU kernels get wrong, then build the model runner."""
        ask_for_amx()
        mend_expanded_sampling()
        super().init_device()
        unlink_collective_memory()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models."""
        super().load_model(*args, **kwargs)
        mend_sliding_sinks(self.vllm_config)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache."""
        super().initialize_from_config(kv_cache_config)
        layers = {a.attn.layer_name: a.attn for a in self.drafter.model.context.attentions}
        self._num_blocks = kv_cache_config.num_blocks
        self._draft_groups = [
            (number, group.kv_cache_spec.block_size, own)
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if (own := [layers[name] for name in group.layer_names if name in layers])
        ]
        """Number, tokens per block and drafter's layers of each cache group that has any."""

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run the target, and sample and draft in the same call unless a grammar has a say.

        Saves a call from the engine, which between processes takes a while.
        """
        self._forget_blocks(scheduler_output)
        output = super().execute_model(scheduler_output)
        may_go_on = not (
            self.use_v2_model_runner or scheduler_output.has_structured_output_requests
        )
        return self.sample_tokens(None) if output is None and may_go_on else output

    def _forget_blocks(self, step: SchedulerOutput) -> None:
        """Leave nothing of earlier owners in cache blocks that change hands."""
        for group, block_size, layers in self._draft_groups:
            blocks = fresh_blocks(step, group, block_size)
            if blocks:
                clear_blocks((layer.kv_cache for layer in layers), self._num_blocks, blocks)
            if self.use_v2_model_runner:  # it stores context in every step, so none waits
                continue
            # Those that were preempted gave their blocks away before; the runner still lists them.
            runner = self.model_runner
            still_own = step.finished_req_ids & runner.input_batch.req_id_to_index.keys()
            blocks += useless_blocks(
                [runner.requests[name] for name in still_own],
                group,
                block_size,
                caches_prefixes=self.cache_config.enable_prefix_caching,
            )
            self.drafter.drop_context(blocks, block_size)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Sample and draft: the end of a step."""
        if self.use_v2_model_runner:  # counts its random numbers by position
            return super().sample_tokens(grammar_output)
        with seeds_kept(self.model_runner):
            return super().sample_tokens(grammar_output)


class DFlashGPUWorker(DraftingWorker):
    """vLLM's CUDA worker with our speculator in its model runner."""

    def init_device(self) -> None:
        """Build the model runner. Raises `ValueError` if that would be V1's."""
        if not self.use_v2_model_runner:
            raise ValueError(
                "on CUDA, vllm-dflash supports Model Runner V2 only, and this configuration gets"
                " V1: unset VLLM_USE_V2_MODEL_RUNNER and leave out what V2 does not support yet"
                f" (vLLM's log names it). {SWITCH_OFF}."
            )
        super().init_device()
