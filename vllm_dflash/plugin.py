"""The entrance, and every hook of ours in vLLM, by name.

`register` runs once in every vLLM process (entry point group `vllm.general_plugins`) and places the
hook "entrance". All others are placed only if `method: "dflash"` was selected and our code runs the
drafter, so plain serving and other speculative methods run unmodified vLLM. An engine that our code
cannot run is left to vLLM's own DFlash (`config/left_to_vllm.py`), for example if `compatibility`
finds that this vLLM lacks something. Nothing imports this module, and it imports nothing heavy.

Each hook: what it is. Why we need it. Replaced by: what would take its place in vLLM. Upstream:
the issue, once one is filed; docs/engineering/upstream.md has the texts of those that are bugs.

In the front end:

- entrance: `EngineArgs.create_speculative_config` is wrapped (here). Why: `LLM(...)` and `vllm
  serve` pass the user's speculative config through it before any process starts, so that a pair
  that does not fit can be refused. Replaced by: a registry of speculative methods. Upstream: none.
- speculative config: our keys are removed, missing ones filled in, drafts said to be greedy, and
  `disable_eagle_block_drop` set (`write_speculative_config`). On CUDA with a table of lengths. Why:
  vLLM needs its keys, would keep the logits of drawn drafts, and captures graphs only for lengths
  of its table. Replaced by: defaults of a method, and a list of lengths to capture; vLLM 0.33 keeps
  the last block of a cached prefix. Upstream: none.
- draft config: in vLLM's copy of the drafter's config, four fields are what V1 accepts,
  `trust_remote_code` is off while vLLM reads it, and `draft_load_config` says "safetensors"
  (`config/draft_config.py`). Why: vLLM refuses DFlash 2, LiLiCorr and several cache groups on V1,
  and would run code or read pickles of a drafter. Replaced by: support for them, a limit of length
  of the draft model's own, and switches for a drafter alone. Upstream: none.
- options: `additional_config` carries the checked options to all workers, as one JSON string. Why:
  it is part of the compile cache's key. Replaced by: options of a plugin. Upstream: none.
- worker, scheduler: `worker_cls`, and `scheduler_cls` unless the user has set it. Why: a worker
  installs our drafting code, a scheduler plans drafts. On a node without this package, importing
  the worker fails with an error that names it. Replaced by: nothing; they are made for this.
- draft model: `ModelRegistry.register_model` (`model/registration.py`), here and in workers. Why:
  vLLM's own `DFlashDraftModel` has neither of our heads. Replaced by: nothing; it is made for this.
- Ray executor: `distributed_executor_backend`, if it is "ray" on CUDA. Why: every node is checked
  before a worker starts (`cluster/`). Replaced by: a hook in vLLM's executor. Upstream: none.
- one cache group: `disable_hybrid_kv_cache_manager` on V1, unless layers other than attention need
  several groups. Why: V1's drafters have one. Replaced by: drafters with several. Upstream: none.
- request options: `InputProcessor.process_inputs` is wrapped (`engine/checked_requests.py`). Why: a
  wrong `dflash` option of a request is refused. Replaced by: checks of a plugin's. Upstream: none.
- figures: `StatLoggerManager.__init__` is wrapped (`engine/reporting/`), and figures travel as
  `SchedulerStats.running_lora_adapters`, a declared field. Why: `vllm.stat_logger_plugins` would
  load our logger for plain engines too. Replaced by: loggers named in an engine's config, and a
  free field. Upstream: none.
- streamed pieces: `DelegatingParser.parse_delta` is wrapped. Why: parsers of tool calls and of
  reasoning get one token after another, as from plain decoding. Replaced by: parsers that take any
  number of tokens. Upstream: streamed_pieces.py.

In the engine's process:

- drafts with output: `MultiprocExecutor.take_draft_token_ids` (`engine/v1/v1_scheduler.py`). Why:
  no separate call fetches them. Replaced by: drafts in `ModelRunnerOutput`. Upstream: none.
- Ray on CPUs: only with `CPURayExecutor`, three names of `ray_executor_v2`, `SpinCondition.wait`
  and the rendezvous address (`cluster/`). Why: vLLM's executor asks for an accelerator. Replaced
  by: a `ray_device_key` of its CPU platform. Upstream: none.

In a worker (`engine/worker.py` and its subclasses, which also extend vLLM's methods):

- drafter: the runner's `drafter` (V1) or `speculator` (V2) is ours, a subclass of vLLM's. Why: it
  is what we are for. Replaced by: `method: custom_class`, once it gets hidden states and a cache.
- context limit: `_input_fits_in_drafter` (V1). Why: vLLM compares the longest request of a batch,
  and would leave holes in all others' cache. Replaced by: a limit per request. Upstream: none.
- unplanned windows: `aot_schedule` of FlashAttention's builder is off for layers with a window
  (`engine/attention_groups.py`). Why: it would plan for a cache that keeps only the window, and
  ours keeps all. Replaced by: a plan from the layer's cache. Upstream: none.
- request texts: `token_ids_cpu` is read (V1), and `all_token_ids` lies in device memory (V2). V1's
  scheduler gets the drafter's own number of drafts. Why: free drafts are copied from texts, and
  may be longer than a block. Replaced by: separate limits for drafts and the block. Upstream: none.
- fused taps: a forward hook on the target (`engine/v2/loaded_speculator.py`). Why: the target's
  graphs then fuse them, without launches in each step. Replaced by: vLLM 0.33's drafter graph does
  so, with a copy of the taps. Upstream: none.
- drawing verifier: the runner's `sampler` and `rejection_sampler` on V2 (`engine/v2/drawing.py`).
  Why: they draw what plain decoding would, so that texts do not depend on drafts. Replaced by: a
  `rejection_sample_method` that does so. Upstream: none.
- captured lengths: `build_dynamic_sd_schedule_lookup` while a runner plans its graphs, and
  `spec_token_ids` of each request (V2). Why: all lengths have graphs even with few requests, and
  each request has its own number of drafts. Replaced by: as for "speculative config".
- draft trees: `prepare_attn`, `rejection_sampler` and `forward` of the target's attention, only if
  requested (`engine/v2/trees/`). Why: nodes have the positions of their depths and see only their
  ancestors. Replaced by: trees in Model Runner V2. Upstream: none.

- fixes: a file of `engine/vllm_fixes/` or `engine/v1/v1_fixes/` each. Why: bugs that users meet
  with drafts. Replaced by: what the file says. Upstream: under the file's name.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__
from vllm_dflash.config.engine_options import (
    ADDITIONAL_CONFIG_KEY,
    CHECK_REQUESTS,
    DRAFT_MODEL,
    PARSE_TOKEN_BY_TOKEN,
    RAY_EXECUTOR,
    SCHEDULER,
    SHOW_FIGURES,
    EngineOptions,
    uses_our_ray_executor,
    worker_here,
)
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.config.speculative_settings import SpeculativeSettings


def register() -> None:
    """Place the hook "entrance". Entry point; idempotent.

    Never raises: if the hook cannot be placed, engines run as if this package was not installed.
    """
    try:
        _wrap_front_end()
    except Exception as error:
        from vllm.logger import init_logger

        init_logger("vllm.dflash").warning(
            "vllm-dflash %s does not fit this vLLM and is not active (%s: %s). vLLM's own DFlash"
            " runs if you remove our options: %s. Install matching versions.",
            __version__,
            type(error).__name__,
            error,
            ", ".join(OWN_KEYS),
        )


def _wrap_front_end() -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if hasattr(original, "wrapped_by_vllm_dflash"):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: EngineArgs, target_model_config: ModelConfig, *args: Any, **kwargs: Any
    ) -> SpeculativeConfig | None:
        from vllm_dflash.config.engine_settings import remove_our_settings, write_speculative_config
        from vllm_dflash.config.speculative_settings import SpeculativeSettings, requested_settings

        def read(engine_args: EngineArgs) -> SpeculativeConfig | None:
            return original(engine_args, target_model_config, *args, **kwargs)

        remove_our_settings(self)
        requested = requested_settings(self)
        if requested is None:
            return read(self)

        from vllm_dflash.config.draft_config import read_by_vllm
        from vllm_dflash.config.left_to_vllm import leave_to_vllm
        from vllm_dflash.model.registration import restore_draft_model

        with _refusals_logged():
            config, reasons = _config_and_reasons(
                requested,
                target_model_config,
                *args,
                **kwargs,
                has_watermark=getattr(self, "watermark_config", None) is not None,
                carries_options=isinstance(getattr(self, "additional_config", {}), dict),
            )
            if reasons and requested.get("require") not in (None, False):
                raise ValueError(
                    f'vllm-dflash cannot run this engine: {"; ".join(reasons)}. With "require":'
                    " false in the speculative config, vLLM's own DFlash runs it."
                )
        asked = copy.copy(self)  # the user may make another config from these arguments
        if reasons:
            leave_to_vllm(asked, config, reasons)
            restore_draft_model()
            return read(asked)
        with _refusals_logged():
            settings = SpeculativeSettings.from_config(requested)
            options = _select(self, settings, config, target_model_config, *args, **kwargs)
        write_speculative_config(asked, options)
        return read_by_vllm(read, asked, target_model_config, options.drafter)

    create_speculative_config.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def _config_and_reasons(
    requested: dict[str, Any], target_model_config: ModelConfig, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """The drafter's `config.json`, and why vLLM's own DFlash runs this engine; no reasons if our
    code does."""
    import vllm
    from vllm.logger import init_logger

    from vllm_dflash.compatibility import untested, vllm_unsupported_reason
    from vllm_dflash.config.engine_options import runner_here
    from vllm_dflash.config.left_to_vllm import config_of_drafter, unsupported_reasons

    try:
        unsupported = vllm_unsupported_reason("front_end", "engine", "worker", runner_here())
    except (ImportError, AttributeError) as error:
        unsupported = f"vllm-dflash {__version__} does not know vLLM {vllm.__version__} ({error})"
    if unsupported:
        with suppress(Exception):  # vLLM reports what is wrong with the config
            return config_of_drafter(requested), [unsupported]
        return {}, [unsupported]
    config = config_of_drafter(requested)
    reasons = unsupported_reasons(requested, config, target_model_config, *args, **kwargs)
    if not reasons and (line := untested(vllm.__version__)):
        init_logger("vllm.dflash").warning_once(line)
    return config, reasons


@contextmanager
def _refusals_logged() -> Iterator[None]:
    """Log at ERROR why an engine does not start: vLLM's traceback would bury the message."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        from vllm.logger import init_logger

        init_logger("vllm.dflash").error("%s", error)
        raise


def _select(
    engine_args: EngineArgs,
    settings: SpeculativeSettings,
    drafter_config: dict[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> EngineOptions:
    """Refuse impossible settings, resolve the rest, and place the front end's other hooks."""
    from vllm.logger import init_logger
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_dflash.config.engine_settings import (
        choose_step_size,
        make_room_for_prompts,
        refuse,
        remarks,
    )
    from vllm_dflash.config.pair import resolve
    from vllm_dflash.model.registration import register_draft_model

    parallel = target_parallel_config
    refuse(engine_args, parallel)
    choose_step_size(engine_args, target_model_config, parallel)
    options = resolve(settings, drafter_config, target_model_config, engine_args, parallel)
    log = init_logger("vllm.dflash")
    for remark in remarks(engine_args, target_model_config, options):
        log.warning_once("%s", remark)
    make_room_for_prompts(engine_args, target_model_config, options.num_speculative_tokens)
    parallel.worker_cls = worker_here()
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: options.to_json(),
    }
    if engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = SCHEDULER
    # The class and not its path: vLLM would start a process to inspect a path.
    register_draft_model(resolve_obj_by_qualname(DRAFT_MODEL.replace(":", ".")))
    if uses_our_ray_executor(parallel):
        # The class and not its path: vLLM takes a path for an executor without Ray (`use_ray`).
        parallel.distributed_executor_backend = resolve_obj_by_qualname(RAY_EXECUTOR)
    manager = engine_args.disable_hybrid_kv_cache_manager
    if options.runner == "v1" and manager is None and not target_model_config.is_hybrid:
        engine_args.disable_hybrid_kv_cache_manager = True
    for place in (SHOW_FIGURES, CHECK_REQUESTS, PARSE_TOKEN_BY_TOKEN):
        resolve_obj_by_qualname(place)()
    return options
