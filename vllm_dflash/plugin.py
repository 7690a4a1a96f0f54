"""Every attachment point in vLLM: where, why, and what would replace it.

`register` runs once in every vLLM process (entry point group `vllm.general_plugins`) and places
hook 1. The others are placed only if `method: "dflash"` was selected and our code runs the drafter,
so plain serving and other speculative methods run unmodified vLLM. (Hook 14 is placed only if the
user names that executor.) `seams` lists what we rely on. Before a hook other than 1 is placed,
`compatibility` checks that its target exists, by reading vLLM's sources. This module imports
nothing heavy.

Engines that our code does not run are left to vLLM's own DFlash (`config/left_to_vllm.py`), for
example if vLLM is too old or lacks something we rely on. Only hook 1 is placed there.

Wrapped vLLM functions (18, 20 and 23 wrap three more):

 1. `EngineArgs.create_speculative_config` (here). The one place where `LLM(...)` and `vllm serve`
    pass the user's speculative config before any process starts, so a pair that does not fit can
    be refused and defaults filled in. Replaced by: a registry of speculative methods in vLLM.
 2. `MultiprocExecutor.take_draft_token_ids` (`v1/v1_scheduler.py`). Drafts come with the
    step's output, so no separate call fetches them. Replaced by: drafts in `ModelRunnerOutput`.

vLLM settings that we fill in (`_select` here, `config/engine_settings.py`):

 3. `worker_cls`. Our worker installs our drafting code. On a node without this package, importing
    the class fails with an error that names it.
 4. `additional_config`. Carries the checked options to all workers as one JSON string, which is
    part of the compile cache's key.
 5. `scheduler_cls`, unless the user chose one. V1's takes the drafts that come with the output;
    V2's plans each step's drafts.
 6. `ModelRegistry.register_model`, here and in workers. Registers our draft model as
    `DFlashDraftModel`. vLLM warns that this replaces its own.
 7. `distributed_executor_backend`, if it is "ray" (on CUDA, unless vLLM 0.32's older Ray executor
    is selected). A subclass of vLLM's executor checks every node before a worker starts
    (`cluster/ray_executor.py`). Replaced by: a hook in vLLM's executor.
 8. The speculative config. Our own keys are removed and missing ones filled in: method, number of
    drafts, the drafter's ranks, greedy drafts (vLLM's drawn ones would keep their logits) and
    `disable_eagle_block_drop`, which keeps the last block of a cached prefix (until vLLM 0.32 is
    dropped; 0.33 keeps it). On CUDA also a table of draft lengths, which only makes vLLM capture
    graphs for them: our schedulers overrule the length that vLLM looks up there by batch size (and
    hook 22). Replaced by: a list of lengths to capture.
 9. `disable_hybrid_kv_cache_manager` on V1, whose drafters have one cache group, even if the
    target has sliding layers. Not set if it has layers other than attention, which need several.

Set by our worker (`engine/worker.py`) on its own model runner:

10. `drafter` (V1), `speculator` (V2). Subclasses of vLLM's replace what the runner has built.
    Replaced by: `method: custom_class`, once it gets hidden states and a KV cache.
11. `_input_fits_in_drafter` (V1). vLLM compares the longest request of the batch with the context
    limit, and would leave holes in the drafter's cache of all others; our proposer limits each
    request separately. Replaced by: a per-request limit in vLLM.

Our workers and schedulers are subclasses of vLLM's and do more than place hooks: a CPU worker
samples and drafts in the call that runs the target, drafts and costs travel as attributes of
`ModelRunnerOutput` (`engine/message.py`), vLLM's JIT monitor starts once costs are measured, new
weights for a drafter are refused (`engine/worker.py`), and drafter layers with a window keep their
whole context in the cache (`DraftAttentionCache` in `model/layers.py`).

Adjusted vLLM objects:

12. The drafter's config, as vLLM reads it (`config/draft_config.py` says why):
    `trust_remote_code` is off while vLLM reads it, and in vLLM's copy `architectures`,
    `dflash_config`, `layer_types` and `max_model_len` are set to what V1 accepts. Replaced by:
    DFlash 2, LiLiCorr and drafters with several cache groups on V1, and a limit of the draft
    model's own.
13. `aot_schedule` of a FlashAttention metadata builder is off for layers with a window: it would
    plan for the cache's window, and our cache keeps everything (`engine/attention_groups.py`).
14. Only if the user names `CPURayExecutor`, because vLLM's Ray executor asks for an accelerator:
    three names of `ray_executor_v2` while that executor is built, `SpinCondition.wait` of its
    message queues, and a rendezvous address that names the node (`cluster/ray_executor.py`,
    `cluster/ray_worker.py`). Replaced by: a `ray_device_key` of vLLM's CPU platform.

Read from vLLM's runners, and copied for its scheduler, for free drafts:

15. Request texts: `input_batch.token_ids_cpu` (V1; the sampled tokens are written there before the
    runner writes the same ones) and `req_states.all_token_ids` (V2; replaced by a tensor in device
    memory, as vLLM does for its ngram method). V1's scheduler gets a copy of the config in which
    `num_speculative_tokens` is the drafter's, so that vLLM reserves room for each request's block
    and not for its longest free draft. Replaced by: separate limits for drafts and for the block.

The step on V2 (`engine/v2/speculator.py`):

16. A forward hook on the target's module (`loaded_speculator.py`): its forward ends with fusing the
    taps, so that its graphs do it, and not launches in each step. Replaced by: vLLM 0.33 fuses them
    in the drafter's graph, which costs a copy of the taps.
21. The runner's `sampler` and `rejection_sampler` are subclasses of vLLM's (`drawing.py`). They
    draw what plain decoding would draw, and accept drafts that are drawn: two launches for six, and
    texts that do not depend on drafts. Drafts are drawn with the same noise (`draft_noise.py`).
    Replaced by: a `rejection_sample_method` of vLLM's that does so.

Each request gets its own number of placeholders for drafts (`request.spec_token_ids`). The
drafter's graphs are captured with a copy of the config that has no table of lengths (hook 8), and
with larger sizes, and there are as many for steps without a block. Replaced by: the same decisions
in vLLM, and separate capture sizes for the drafter.

22. `build_dynamic_sd_schedule_lookup` of `cudagraph_utils`, while a runner plans its graphs: all
    lengths of hook 8's table, even if the largest batch has fewer requests (`captured_lengths.py`).
    A larger `max_num_seqs` would do as well, but takes rows and memory from prompts, and vLLM
    refuses one beyond the blocks of a hybrid's cache. Replaced by: as hook 8.

Draft trees on V2, only if requested (`engine/v2/trees/draft_trees.py`):

17. In a runner, before graphs are captured: `prepare_attn` gives nodes the positions of their
    depths after vLLM has given them consecutive slots; `rejection_sampler` also walks trees along
    what is drawn; and `forward` of the target's attention layers applies the trees' masks
    (`engine/v2/trees/tree_attention.py`). The speculator is built with a copy of the config in
    which `num_speculative_tokens` is the drafter's, because a request's drafts have as many places
    as a tree has nodes. Replaced by: tree attention and tree verification in Model Runner V2.

Figures for `/metrics` (`engine/reporting/figures.py`, `engine/reporting/prometheus.py`):

18. `StatLoggerManager.__init__` is wrapped in the front end, to add our stat logger before vLLM's
    Prometheus logger; `vllm.stat_logger_plugins` would load ours for plain engines too. Our
    schedulers' figures reach it as `SchedulerStats.running_lora_adapters`, a declared field, and
    are removed from it before vLLM's logger reads that. Replaced by: stat loggers named in an
    engine's config, and a free field.

vLLM bugs fixed here, in workers and schedulers:

19. `engine/vllm_fixes/` and `engine/v1/v1_fixes/`: one file per bug, which says when to delete
    it (docs/engineering/upstream.md has an issue for each): `expanded_sampling.py`,
    `seeded_chunks.py`, `sliding_sinks.py`, `collective_memory.py`, `gathered_ids.py`,
    `stale_blocks.py`, `amx_permission.py`, `short_draft_states.py` and `aligned_states.py`
    (CPU; the last two: hybrid targets), `undrafted_sampling.py`, `scored_tokens.py` and
    `bonus_min_tokens.py` (V1: the runner's `rejection_sampler`), `thinking_budgets.py` (V1),
    `scored_verification.py` and `repeated_uploads.py` (V2: bases of hook 21's),
    `undrafted_graphs.py` (V2: the model state's `prepare_attn`), `short_rotary_tables.py`,
    `stopped_sessions.py` (a base of our schedulers).

Also in the front end:

20. `InputProcessor.process_inputs` is wrapped: for engines that we run, a request that would crash
    its worker, or whose `dflash` options in `extra_args` are wrong, is refused
    (`engine/vllm_fixes/request_limits.py`). Replaced by: vLLM's own checks, and a list of checks
    that plugins can add to.
23. `DelegatingParser.parse_delta` is wrapped: of an output with several tokens, parsers of tool
    calls and of reasoning get one token after another, as from plain decoding, and the client one
    message (`engine/vllm_fixes/streamed_pieces.py`). Replaced by: parsers that take any number of
    tokens.
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
    DRAFT_MODEL,
    PARSE_TOKEN_BY_TOKEN,
    RAY_EXECUTOR,
    REFUSE_REQUESTS,
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
    """Place hook 1. Entry point; idempotent.

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

        from vllm_dflash.checkpoint.spec import DrafterError
        from vllm_dflash.config.draft_config import read_by_vllm
        from vllm_dflash.config.left_to_vllm import leave_to_vllm

        with _refusals_logged(ValueError, RuntimeError):
            config, reasons = _why_left(
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
        with _refusals_logged(ValueError, RuntimeError):
            settings = SpeculativeSettings.of(requested)
            options = _select(self, settings, config, target_model_config, *args, **kwargs)
        write_speculative_config(asked, options)
        with _refusals_logged(DrafterError):
            return read_by_vllm(read, asked, target_model_config, options.drafter, config)

    create_speculative_config.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def _why_left(
    requested: dict[str, Any], target_model_config: ModelConfig, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """The drafter's `config.json`, and why vLLM's own DFlash runs this engine; no reasons if our
    code does."""
    import vllm
    from vllm.logger import init_logger

    from vllm_dflash.compatibility import untested
    from vllm_dflash.config.left_to_vllm import config_of_drafter, why_left, why_unfit_here

    try:
        unfit = why_unfit_here()
    except (ImportError, AttributeError) as error:
        unfit = f"vllm-dflash {__version__} does not know vLLM {vllm.__version__} ({error})"
    if unfit:
        with suppress(Exception):  # vLLM reports what is wrong with the config
            return config_of_drafter(requested), [unfit]
        return {}, [unfit]
    if line := untested(vllm.__version__):
        init_logger("vllm.dflash").warning_once(line)
    config = config_of_drafter(requested)
    return config, why_left(requested, config, target_model_config, *args, **kwargs)


@contextmanager
def _refusals_logged(*kinds: type[Exception]) -> Iterator[None]:
    """Log at ERROR why an engine does not start: vLLM's traceback would bury the message."""
    try:
        yield
    except kinds as error:
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
    """Refuse impossible settings, resolve the rest, and place hooks 3 to 7, 9, 18, 20 and 23."""
    from vllm.logger import init_logger
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_dflash.config.engine_settings import (
        choose_step_size,
        make_room_for_prompts,
        refuse,
        remarks,
    )
    from vllm_dflash.config.pair import resolve

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
    resolve_obj_by_qualname(SHOW_FIGURES)()  # hook 18
    resolve_obj_by_qualname(REFUSE_REQUESTS)()  # hook 20
    resolve_obj_by_qualname(PARSE_TOKEN_BY_TOKEN)()  # hook 23
    return options


def register_draft_model(kind: type | str = DRAFT_MODEL) -> None:
    """Place hook 6, in the front end and in every worker."""
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_dflash.checkpoint.spec import ARCHITECTURE

    models = getattr(ModelRegistry, "models", {})
    if ARCHITECTURE in models:
        _vllms_own.setdefault(ARCHITECTURE, models[ARCHITECTURE])
    ModelRegistry.register_model(ARCHITECTURE, kind)


_vllms_own: dict[str, Any] = {}
"""vLLM's entries of its registry that ours have replaced, by architecture."""


def restore_draft_model() -> None:
    """Take hook 6 back, for an engine that vLLM's own DFlash runs."""
    from vllm.model_executor.models.registry import ModelRegistry

    getattr(ModelRegistry, "models", {}).update(_vllms_own)
