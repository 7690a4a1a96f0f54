"""Every hook we place in vLLM, on one page: why, how, and what would replace it.

`register` runs once in every vLLM process (entry point group `vllm.general_plugins`) and places
hook 1. The others are placed only where `method: "dflash"` was selected, so plain serving and
other speculative methods run unmodified vLLM. This module imports nothing heavy: vLLM only logs
an ImportError of a plugin, and would then silently run its own DFlash.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__
from vllm_dflash.config.class_paths import (
    CPU_RAY_EXECUTOR,
    CPU_WORKER,
    DRAFT_MODEL,
    RAY_EXECUTOR,
    SCHEDULER,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.config.options import DFlashOptions
    from vllm_dflash.config.speculative_settings import SpeculativeSettings


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
        from vllm_dflash.seams import FRONT_END, check_vllm

        try:
            config = config_to_run(requested)
        except (ImportError, AttributeError):
            check_vllm(FRONT_END)  # a vLLM that we do not know is to be named first
            raise
        if config is None:
            return read(self)
        check_vllm(FRONT_END)
        settings = SpeculativeSettings.of(requested)
        options = _select(self, settings, config, target_model_config, *args, **kwargs)
        return read_by_vllm(read, self, target_model_config, options.drafter, config)

    create_speculative_config.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


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
    12. `distributed_executor_backend`, where it is "ray". Why: our subclass of vLLM's executor
       asks every node before a worker starts. How: vLLM's own setting.
    """
    from vllm import envs
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

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
    if backend == "ray" and envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        # The class and not its path, which vLLM would take for an executor without Ray (`use_ray`).
        target_parallel_config.distributed_executor_backend = resolve_obj_by_qualname(RAY_EXECUTOR)
    return options


def register_draft_model() -> None:
    """Hook 5, in the front end and in every worker. vLLM warns that it replaces its own."""
    from vllm.model_executor.models.registry import ModelRegistry

    ModelRegistry.register_model("DFlashDraftModel", DRAFT_MODEL)
