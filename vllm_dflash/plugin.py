"""Every hook we place in vLLM, on one page: why, how, and what would replace it.

`register` runs once in every vLLM process (entry point group `vllm.general_plugins`) and places
hook 1. The others are placed only where `method: "dflash"` was selected, so plain serving and
other speculative methods run unmodified vLLM. This module imports nothing heavy: vLLM only logs
an ImportError of a plugin, and would then silently run its own DFlash.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__
from vllm_dflash.config.class_paths import (
    CPU_RAY_EXECUTOR,
    CPU_WORKER,
    DRAFT_MODEL,
    GPU_WORKER,
    SCHEDULER,
)

if TYPE_CHECKING:
    from logging import Logger

    from ray.util.placement_group import PlacementGroup
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_dflash.config.options import DFlashOptions
    from vllm_dflash.config.speculative_settings import SpeculativeSettings
    from vllm_dflash.engine.v1.proposer import DFlashProposer
    from vllm_dflash.engine.v2.speculator import DFlashSpeculator
    from vllm_dflash.planning.costs import Curve, StepCosts
    from vllm_dflash.seams import Seam


def register() -> None:
    """Hook 1: `EngineArgs.create_speculative_config`. Entry point; idempotent.

    Why: the one place where `LLM(...)` and `vllm serve` pass the user's speculative config before
    any process starts, so a pair that does not fit can be refused and defaults filled in.
    How: wrapped; calls the original untouched unless the method is dflash, and our code runs the
    drafter's architecture. Replaced by: a registry of speculative methods in vLLM.

    Never raises: engines that do not use DFlash go on as if we were not there. Where the hook
    cannot be placed, our draft model stands for vLLM's own, and refuses to be built, since nobody
    has selected it: a DFlash that was asked for stops instead of silently being another.
    """
    try:
        if "vllm.v1.executor.ray_executor_v2" in sys.modules:  # an engine's process that uses it
            check_nodes_before_ray_workers()
        _wrap_front_end()
    except Exception as error:
        from vllm.logger import init_logger

        init_logger("vllm.dflash").error(
            "vllm-dflash %s cannot be placed in this vLLM (%s: %s): speculative method 'dflash'"
            " will not start, all else runs as without it. Install a matching pair, or set"
            " VLLM_PLUGINS='' to run without vllm-dflash.",
            __version__,
            type(error).__name__,
            error,
        )
        with suppress(Exception):
            register_draft_model()


def _wrap_front_end() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs, target_model_config: ModelConfig, *args: Any, **kwargs: Any
    ) -> SpeculativeConfig | None:
        from vllm_dflash.config.speculative_settings import SpeculativeSettings, requested_settings

        def read(engine_args: EngineArgs) -> SpeculativeConfig | None:
            return original(engine_args, target_model_config, *args, **kwargs)

        requested = requested_settings(self)
        if requested is None:
            return read(self)

        from vllm_dflash.config.draft_config import read_by_vllm
        from vllm_dflash.config.left_to_vllm import config_to_run
        from vllm_dflash.seams import FRONT_END

        try:
            config = config_to_run(requested)
        except (ImportError, AttributeError):
            _check_vllm(FRONT_END)  # a vLLM that we do not know is to be named first
            raise
        if config is None:
            return read(self)
        _check_vllm(FRONT_END)
        settings = SpeculativeSettings.of(requested)
        options = _select(self, settings, config, target_model_config, *args, **kwargs)
        return read_by_vllm(read, self, target_model_config, options.drafter, config)

    create_speculative_config.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def _check_vllm(seams: tuple[Seam, ...]) -> None:
    """Stop, by name, where this vLLM is not the one our hooks were written for."""
    import vllm

    from vllm_dflash.seams import check_seams, check_version

    check_version(vllm.__version__)
    check_seams(seams)


def _select(
    engine_args: EngineArgs,
    settings: SpeculativeSettings,
    drafter_config: dict[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> DFlashOptions:
    """Hooks 2 to 5, placed once DFlash is selected: worker, options, scheduler, draft model.

    2. `parallel_config.worker_cls`. Why: our worker installs our proposer, and a node without
       this package fails by name when it imports the class. How: vLLM's own setting.
    3. `additional_config`. Why: carries the checked options to all workers, as one string, and is
       part of the compile cache's key. How: vLLM's own setting.
    4. `scheduler_cls`, unless the user chose one. Why: our synchronous scheduler finds the drafts
       in a step's output, which saves a call to the workers in every step; our asynchronous one
       chooses each step's draft length. How: vLLM's own setting (it warns about all classes that
       are not its own).
    5. `ModelRegistry.register_model`. Why: our draft model stands for the architecture
       `DFlashDraftModel`. How: vLLM's own registry.
    """
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from vllm_dflash.config.engine_settings import (
        choose_verification,
        choose_worker,
        fill_in_defaults,
    )
    from vllm_dflash.config.options import ADDITIONAL_CONFIG_KEY
    from vllm_dflash.config.pair import resolve
    from vllm_dflash.config.thread_binding import check_thread_binding

    worker = choose_worker(target_parallel_config.worker_cls)
    if engine_args.enable_lora:
        raise ValueError(
            "method 'dflash' does not support LoRA yet: the drafter shares the target's embedding"
            " and head, which LoRA wraps. Leave enable_lora out."
        )
    options = resolve(settings, drafter_config, target_model_config, target_parallel_config)
    for remark in options.drafter.remarks:
        init_logger("vllm.dflash").warning_once("drafter %r: %s", settings.model, remark)
    backend = target_parallel_config.distributed_executor_backend
    if backend == "ray" and current_platform.is_cpu():
        raise ValueError(
            "vLLM's own Ray executor takes no CPUs, which would come out in the engine's process"
            f" only. Set distributed_executor_backend to '{CPU_RAY_EXECUTOR}', or to 'mp' for"
            " processes of this machine (which vLLM does not choose inside a placement group)."
        )
    if backend == "mp":
        check_thread_binding(target_parallel_config.local_world_size)
    target_parallel_config.worker_cls = worker
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: options.to_json(),
    }
    if engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = SCHEDULER
    is_v1 = worker == CPU_WORKER and not envs.VLLM_USE_V2_MODEL_RUNNER
    if is_v1 and engine_args.disable_hybrid_kv_cache_manager is None:
        # Targets with sliding layers get several cache groups, and the V1 runner's drafters one.
        engine_args.disable_hybrid_kv_cache_manager = True
    fill_in_defaults(engine_args, options, choose_verification(engine_args, options))
    register_draft_model()
    if backend == "ray":
        check_nodes_before_ray_workers()  # for an engine in this process, or forked from it
    return options


def register_draft_model() -> None:
    """Hook 5, in the front end and in every worker. vLLM warns that it replaces its own."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("DFlashDraftModel", DRAFT_MODEL)


def install_v1_proposer(proposer: type[DFlashProposer]) -> None:
    """Hook 6, in a worker: the name `DFlashProposer` in the V1 runner's module is ours.

    Why: the runner builds its drafter from this name and checks instances against it.
    How: rebound in this process, before the runner is built; nothing of vLLM's class is used.
    Replaced by: `method: custom_class`, once that gets hidden states and a KV cache.
    """
    from vllm.v1.worker import gpu_model_runner

    from vllm_dflash.seams import V1_WORKER

    _check_vllm(V1_WORKER)
    gpu_model_runner.DFlashProposer = proposer
    register_draft_model()


def attach_to_v1_runner(runner: GPUModelRunner, proposer: type[DFlashProposer]) -> DFlashProposer:
    """Hook 7, in a worker: `_input_fits_in_drafter` and `rejection_sampler` of this runner.

    Why: vLLM compares the longest request of the batch with the context limit; one long request
    would switch drafting off for all and leave holes in the drafter's cache. Our proposer
    limits each request by itself. And its rejection sampler fails at top-k on steps without
    drafts; ours samples those as plain decoding does. How: replaced on the instance.
    Replaced by: a per-request limit, and a check for an empty batch, in vLLM.

    Raises:
        RuntimeError: the runner was built with another proposer.
    """
    from vllm_dflash.engine.vllm_fixes.sampling import DraftRejectionSampler

    drafter = _expect(getattr(runner, "drafter", None), proposer)
    runner._input_fits_in_drafter = lambda common_attn_metadata: common_attn_metadata is not None
    runner.rejection_sampler = DraftRejectionSampler(
        runner.sampler, runner.speculative_config, runner.device
    )
    return drafter


def install_v2_speculator() -> None:
    """Hook 10, in a worker: the name `DFlashSpeculator` in its module of Model Runner V2 is ours.

    Why: V2 builds its speculator from this name. How: rebound in this process, before the runner
    is built; ours is a subclass of it. Replaced by: a registry of speculators in vLLM.
    """
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    from vllm_dflash.seams import V2_WORKER

    if not hasattr(speculator.DFlashSpeculator, "of_vllm_dflash"):
        _check_vllm(V2_WORKER)
        from vllm_dflash.engine.v2.speculator import DFlashSpeculator

        speculator.DFlashSpeculator = DFlashSpeculator
    register_draft_model()


def attach_to_v2_runner(runner: GPUModelRunnerV2) -> DFlashSpeculator:
    """Part of hook 10: what vLLM gives to its n-gram speculator, ours reads, too.

    Raises:
        RuntimeError: the runner was built with another speculator.
    """
    from vllm_dflash.engine.v2.speculator import DFlashSpeculator

    speculator = _expect(runner.speculator, DFlashSpeculator)
    speculator.req_states = runner.req_states
    return speculator


def _expect(drafter: Any, kind: type) -> Any:
    """The drafter the runner has built, if it is ours."""
    if type(drafter) is not kind:
        raise RuntimeError(
            f"vllm-dflash {__version__} was selected, but the model runner built"
            f" {type(drafter).__module__}.{type(drafter).__qualname__} as its drafter."
        )
    return drafter


def mend_cpu_sampling() -> None:
    """Hook 8, in a CPU worker: `expand_batch_to_tokens` of vLLM's rejection sampler.

    Why: vLLM 0.32.0's CPU version of its kernel writes into a converted copy, so every sampled
    request was verified at a temperature, top-k and top-p read from uninitialised memory: drafts
    were lossless at temperature 0 only. How: rebound in this process.
    Replaced by: a fix of `_expand_kernel_impl` in vLLM.
    """
    from vllm.v1.sample import rejection_sampler

    from vllm_dflash.engine.vllm_fixes.sampling import expand_batch_to_tokens

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def mend_cpu_sinks(vllm_config: VllmConfig) -> None:
    """Part of hook 8: `VLLM_CPU_ATTN_SPLIT_KV` for targets like gpt-oss.

    Why: their sliding and full layers share a cache group on the V1 runner, so vLLM plans
    attention for no window; its CPU kernel then splits the keys of a sliding layer, and where a
    part lies outside the window and the layer has sinks, reads what nobody wrote: wrong tokens
    from plain decoding as well (`--disable-hybrid-kv-cache-manager`). How: vLLM's own setting,
    once the layers are known. Replaced by: a fix of vLLM's `cpu_attention_with_kv_cache`.
    """
    from vllm.model_executor.layers.attention import Attention

    layers = vllm_config.compilation_config.static_forward_context.values()
    attentions = [layer for layer in layers if isinstance(layer, Attention)]
    windows = {layer.sliding_window for layer in attentions}
    if len(windows) > 1 and any(layer.has_sink for layer in attentions):
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def drafts_come_with_the_output(vllm_config: VllmConfig) -> bool:
    """Whether workers send drafts along and the engine does not call for them: both ask here."""
    return (
        vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        and not vllm_config.use_v2_model_runner
        and vllm_config.parallel_config.distributed_executor_backend in ("mp", CPU_RAY_EXECUTOR)
    )


def spare_the_call_for_drafts() -> None:
    """Hook 9, in the engine's process: `MultiprocExecutor.take_draft_token_ids`.

    Why: the drafts came with the step's output, so nothing is left to ask the workers for; the
    call takes 0.3 ms on two cores, 2% of a step of a small model. How: wrapped, once our
    scheduler is built; other engines of the process keep the call. Replaced by: drafts in
    `ModelRunnerOutput`.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from vllm_dflash.seams import ENGINE, check_seams

    original = MultiprocExecutor.take_draft_token_ids
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return
    check_seams(ENGINE)

    @functools.wraps(original)
    def take_draft_token_ids(self: MultiprocExecutor) -> DraftTokenIds | None:
        if drafts_come_with_the_output(self.vllm_config):
            return None
        return original(self)

    take_draft_token_ids.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    MultiprocExecutor.take_draft_token_ids = take_draft_token_ids


def let_ray_use_cpus(
    worker: type[RayWorkerProc],
    bundles: Callable[[PlacementGroup], list[tuple[int, str, str]]],
) -> None:
    """Hook 11, in the engine's process: three names in the module of vLLM's Ray executor.

    `RayWorkerProc`, `initialize_ray_cluster`, `get_bundles_sorted_by_node`. Why: all three ask the
    platform for its accelerator, and a CPU has none. How: rebound in this process by our executor
    class, which the user has asked for by name, before it calls vLLM's `_init_executor`; that has
    connected and placed its workers already, so nothing is left for the second. Besides, readers
    of its message queues nap instead of spinning (`SpinCondition.wait`, there, on the instance).
    Replaced by: a `ray_device_key` of vLLM's CPU platform.
    """
    from vllm.v1.executor import ray_executor_v2

    from vllm_dflash.seams import RAY_CPU

    if ray_executor_v2.RayWorkerProc is not worker:
        _check_vllm(RAY_CPU)
        ray_executor_v2.RayWorkerProc = worker
        ray_executor_v2.initialize_ray_cluster = lambda *_, **__: None
    ray_executor_v2.get_bundles_sorted_by_node = bundles


def check_nodes_before_ray_workers() -> None:
    """Hook 12, in the engine's process: `RayExecutorV2._build_runtime_env`.

    Why: called once, when nodes are chosen and no worker has started: a node without this package
    can be named with the command that mends it. How: wrapped; engines without DFlash, and our own
    executor, which asks by itself, get the original. Replaced by: a hook of vLLM's.
    """
    from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

    from vllm_dflash.seams import RAY_NODES, check_seams

    original = RayExecutorV2._build_runtime_env
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return
    check_seams(RAY_NODES)

    @functools.wraps(original)
    def _build_runtime_env(self: RayExecutorV2) -> dict[str, Any]:
        from vllm_dflash.cluster.nodes import check_nodes

        runtime_env = original(self)
        is_ours = self.parallel_config.worker_cls in (CPU_WORKER, GPU_WORKER)
        if is_ours and not hasattr(self, "checks_nodes_itself"):
            check_nodes(self.parallel_config.placement_group, runtime_env)
        return runtime_env

    _build_runtime_env.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    RayExecutorV2._build_runtime_env = _build_runtime_env


def logger() -> Logger:
    """Ours, under vLLM's, so that its settings apply."""
    from vllm.logger import init_logger

    return init_logger("vllm.dflash")


def log_active(options: DFlashOptions, runner: str) -> None:
    """The one line that says which DFlash runs."""
    drafter = options.drafter
    logger().info(
        "vllm-dflash %s is active: runner %s, block size %d, drafting up to %d tokens a step,"
        " taps %s",
        __version__,
        runner,
        drafter.block_size,
        options.num_speculative_tokens,
        list(drafter.taps),
    )


def log_profile(costs: StepCosts, seconds: float) -> None:
    """The line that says what the planner starts from."""

    def milliseconds(curve: Curve) -> str:
        last = int(curve.counts[-1])
        return ", ".join(
            f"{1000 * float(curve.at(count)):.1f} ms for {count}"
            for count in sorted({min(count, last) for count in (1, 8, 64, last)})
        )

    logger().info(
        "draft lengths are planned from costs measured in %.1f s, by tokens: target %s; drafter %s",
        seconds,
        milliseconds(costs.verify),
        milliseconds(costs.draft),
    )
