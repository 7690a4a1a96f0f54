"""The page of hooks: all that we attach to vLLM. Where, why, what would replace it.

`register` runs once in every vLLM process (entry point group `vllm.general_plugins`) and places
hook 1. The others are placed only where `method: "dflash"` was selected and our code runs the
drafter, so plain serving and other speculative methods run unmodified vLLM. (Hook 14
where a user names that executor.) What we rely on is listed in `seams`. Before a hook other than 1
is placed, it is looked for (`compatibility`): what is here by signature, what workers and
schedulers need by vLLM's sources. This module imports nothing heavy.

Engines that ours does not run are left to vLLM's own DFlash (`config/left_to_vllm.py`): those of a
vLLM that is too old, or lacks something we rely on, among them. Hook 1 is all that is placed there.

Functions of vLLM that are wrapped:

 1. `EngineArgs.create_speculative_config` (here). The one place where `LLM(...)` and `vllm serve`
    pass the user's speculative config before any process starts, so a pair that does not fit can
    be refused and defaults filled in. Replaced by: a registry of speculative methods in vLLM.
 2. `MultiprocExecutor.take_draft_token_ids` (`v1/v1_scheduling.py`). Drafts come with the
    step's output, so the call for them is spared. Replaced by: drafts in `ModelRunnerOutput`.

vLLM's own settings, which we fill in (`_apply` here, `config/engine_settings.py`):

 3. `worker_cls`. Our worker puts our drafting code in place; a node without this package fails by
    name when it imports the class.
 4. `additional_config`. Carries the checked options to all workers, as one string; part of the
    compile cache's key.
 5. `scheduler_cls`, unless the user chose one. V1's takes the drafts that come with the output;
    V2's plan each step's drafts.
 6. `ModelRegistry.register_model`, here and in workers. Our draft model stands for the
    architecture `DFlashDraftModel`. vLLM warns that it replaces its own.
 7. `distributed_executor_backend`, where it is "ray" (on CUDA, unless the older Ray executor of
    vLLM 0.32 is asked for). A subclass of vLLM's executor asks every node before a worker starts
    (`cluster/ray_executor.py`). Replaced by: a hook of vLLM's there.
 8. The speculative config, without our own keys, and with what was not given: method, number of
    drafts, drafter's ranks, drafts that are the likeliest token, the last block of a prefix kept
    (until vLLM 0.32 is dropped: 0.33 knows); on CUDA a table of draft lengths, for which vLLM
    captures graphs, and nothing else: our schedulers overrule what it looks up there by batch size.
    Replaced by: a list of lengths to capture.
 9. `disable_hybrid_kv_cache_manager` on V1, whose drafters have one cache group, also where the
    target has sliding layers; not where it has layers that are no attention, which need several.

Assignments in our own worker (`engine/worker.py`), each to its own model runner:

10. `drafter` (V1), `speculator` (V2). Subclasses of vLLM's stand in the place of what the runner
    has built. Replaced by: `method: custom_class`, once that gets hidden states and a KV cache.
11. `_input_fits_in_drafter` (V1). vLLM compares the longest request of the batch with the context
    limit, and would leave holes in the drafter's cache of all others; our proposer limits each by
    itself. Replaced by: a per-request limit in vLLM.

Our workers and schedulers are subclasses of vLLM's and do more than place hooks: a CPU worker
samples and drafts in the call that runs the target, drafts and costs travel as attributes of
`ModelRunnerOutput` (`engine/message.py`), vLLM's JIT monitor starts once
costs are measured, new weights for a drafter are refused (`engine/worker.py`), and drafter layers
with a window keep their whole context in the cache (`DraftAttentionCache` in `model/layers.py`).

Objects of vLLM's that we make or use, adjusted:

12. The drafter's config, as vLLM reads it (`config/draft_config.py`, which says why):
    `trust_remote_code` is off while it reads, and in its copy `architectures`, `dflash_config`,
    `layer_types` and `max_model_len` are what V1 takes. Replaced by: DFlash 2, LiLiCorr and
    drafters with several cache groups on V1, and limits of the draft model's own.
13. `aot_schedule` of a FlashAttention metadata builder is off for layers with a window: it would
    plan for the window of the cache, and ours keeps everything (`engine/attention_groups.py`).
14. Only where the user asks for `CPURayExecutor`, since a CPU has no accelerator that vLLM's could
    ask for: three names of `ray_executor_v2` while that executor is built, the `SpinCondition.wait`
    of its message queues, and a meeting point that names the node (`cluster/ray_executor.py`,
    `cluster/ray_worker.py`). Replaced by: a `ray_device_key` of vLLM's CPU platform.

What is read of vLLM's runners, and copied for its scheduler, for free drafts:

15. `input_batch.token_ids_cpu` (V1; the sampled tokens are written there before the runner writes
    the same ones) and `req_states.all_token_ids` (V2, which is replaced by one in the device's
    memory, as vLLM has it for its ngram method) are the texts. V1's scheduler is given a copy of
    the config in which `num_speculative_tokens` is the drafter's, so that vLLM keeps room for a
    block of each request and not for one as long as its free drafts. Replaced by: a
    limit of drafts beside that of a block.

Draft lengths on V2 (`engine/v2/trimming.py`):

16. `enable_adaptive_verification` is turned on in a worker once its models are loaded, where all
    attention backends allow it: before that nobody knows, and behind it, vLLM would stop with an
    error. The runner's `adaptive_verification` is then ours: vLLM's, with another budget, other
    chances (`draft_token_confidence_probs`), a kernel that splits the budget, and no wait for the
    last step's chances. Without it, requests get placeholders of their own number
    (`request.spec_token_ids`). The drafter's graphs are captured with a copy of the config
    that has no table of lengths (hook 8), and larger sizes. Replaced by: the same decisions in
    vLLM, and capture sizes of the drafter's own.

Draft trees on V2, only where they were asked for (`engine/v2/trees/draft_trees.py`):

19. In a runner, before graphs are captured: `prepare_attn` gives nodes the positions of their
    depths once vLLM has given them slots in a row; `rejection_sampler` is a subclass of vLLM's,
    which walks trees along what vLLM's `gumbel_sample` draws; and `forward` of the target's
    attention layers goes by the trees' masks (`engine/v2/trees/tree_attention.py`). The speculator
    is built with a copy of the config in which `num_speculative_tokens` is the drafter's, because
    a request's drafts have as many places as a tree has nodes. Replaced by: tree attention and tree
    verification in Model Runner V2.

Figures for `/metrics` (`engine/reporting/figures.py`, `engine/reporting/prometheus.py`):

17. `StatLoggerManager.__init__` is wrapped, in the front end: before vLLM's Prometheus logger comes
    one of ours, which `vllm.stat_logger_plugins` would load for plain engines, too. Our schedulers'
    figures reach it as `SchedulerStats.running_lora_adapters`, a declared field, and are taken out
    of it before vLLM's logger reads that. Replaced by: stat loggers named in an engine's config,
    and a free field.

Bugs of vLLM that we mend, in workers and schedulers:

18. `engine/vllm_fixes/` and `engine/v1/v1_fixes/`: a file for each, which says when to delete it
    (docs/engineering/upstream.md has an issue for each): `expanded_sampling.py`,
    `seeded_chunks.py`, `sliding_sinks.py`, `collective_memory.py`, `gathered_ids.py`,
    `stale_blocks.py`, `amx_permission.py`, `short_draft_states.py` and `aligned_states.py` (CPU;
    the last two: hybrid targets), `undrafted_sampling.py`, `scored_tokens.py` and
    `bonus_min_tokens.py` (V1: the runner's `rejection_sampler`), `thinking_budgets.py` (V1),
    `scored_verification.py` (V2: the runner's `rejection_sampler`), `short_rotary_tables.py`,
    `stopped_sessions.py` (a base of our schedulers).

And in the front end:

20. `InputProcessor.process_inputs` is wrapped: of engines that are ours, a request that would end
    its worker is refused (`engine/vllm_fixes/request_limits.py`). Replaced by: vLLM's own checks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from vllm_dflash import __version__
from vllm_dflash.config.mode import (
    ADDITIONAL_CONFIG_KEY,
    DRAFT_MODEL,
    RAY_EXECUTOR,
    REFUSE_REQUESTS,
    SCHEDULER,
    SHOW_FIGURES,
    Mode,
    worker_here,
)
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.config.speculative_settings import SpeculativeSettings


def register() -> None:
    """Place hook 1. Entry point; idempotent.

    Never raises: where the hook cannot be placed, all engines go on as if we were not there.
    """
    try:
        _wrap_front_end()
    except Exception as error:
        from vllm.logger import init_logger

        init_logger("vllm.dflash").warning(
            "vllm-dflash %s stays out of this vLLM, which it does not fit (%s: %s). vLLM's own"
            " DFlash runs, if it is given none of our options: %s. Install matching versions.",
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
        from vllm_dflash.config.speculative_settings import SpeculativeSettings, requested_settings

        def read(engine_args: EngineArgs) -> SpeculativeConfig | None:
            return original(engine_args, target_model_config, *args, **kwargs)

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
            )
            if reasons and requested.get("require") is True:
                raise ValueError(
                    f'vllm-dflash cannot run this engine: {"; ".join(reasons)}. Without "require":'
                    " true in the speculative config, vLLM's own DFlash runs it."
                )
        if reasons:
            leave_to_vllm(self, config, reasons)
            return read(self)
        with _refusals_logged(ValueError, RuntimeError):
            settings = SpeculativeSettings.of(requested)
            mode = _select(self, settings, config, target_model_config, *args, **kwargs)
        with _refusals_logged(DrafterError):
            return read_by_vllm(read, self, target_model_config, mode.drafter, config)

    create_speculative_config.wrapped_by_vllm_dflash = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def _why_left(
    requested: dict[str, Any], target_model_config: ModelConfig, *args: Any, **kwargs: Any
) -> tuple[dict[str, Any], list[str]]:
    """The drafter's `config.json`, and why vLLM's own DFlash runs this engine: no reasons if ours
    does."""
    import vllm
    from vllm.logger import init_logger

    from vllm_dflash.compatibility import untested
    from vllm_dflash.config.left_to_vllm import config_of_drafter, why_left, why_unfit_here

    try:
        unfit = why_unfit_here()
    except (ImportError, AttributeError) as error:
        unfit = f"vllm-dflash {__version__} does not know vLLM {vllm.__version__} ({error})"
    if unfit:
        with suppress(Exception):  # whatever is wrong with it, vLLM says
            return config_of_drafter(requested), [unfit]
        return {}, [unfit]
    if line := untested(vllm.__version__):
        init_logger("vllm.dflash").warning_once(line)
    config = config_of_drafter(requested)
    return config, why_left(requested, config, target_model_config, *args, **kwargs)


@contextmanager
def _refusals_logged(*kinds: type[Exception]) -> Iterator[None]:
    """Say at ERROR why an engine does not start, before vLLM's traceback buries the sentence."""
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
) -> Mode:
    """Refuse what cannot be, resolve what was asked for, and apply it to vLLM's settings."""
    from vllm.logger import init_logger

    from vllm_dflash.config.engine_settings import refuse, refused_by_default
    from vllm_dflash.config.pair import resolve

    parallel = target_parallel_config
    refuse(engine_args, parallel)
    mode = resolve(settings, drafter_config, target_model_config, engine_args, parallel)
    log = init_logger("vllm.dflash")
    for remark in mode.drafter.remarks:
        log.warning_once("drafter %r: %s", settings.model, remark)
    if why := refused_by_default(target_model_config):
        log.warning_once("%s.", why)
    _apply(engine_args, parallel, mode, is_hybrid=target_model_config.is_hybrid)
    return mode


def _apply(
    engine_args: EngineArgs, parallel: ParallelConfig, mode: Mode, *, is_hybrid: bool
) -> None:
    """Place hooks 3 to 9, and 17 and 20, which are of the front end as well."""
    from vllm import envs
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_dflash.config.engine_settings import write_speculative_config

    parallel.worker_cls = worker_here()
    engine_args.additional_config = {
        **engine_args.additional_config,
        ADDITIONAL_CONFIG_KEY: mode.to_json(),
    }
    if engine_args.scheduler_cls is None:
        engine_args.scheduler_cls = SCHEDULER
    # The class and not its path, which a process of its own would be started to look at.
    register_draft_model(resolve_obj_by_qualname(DRAFT_MODEL.replace(":", ".")))
    # vLLM 0.33 has neither the variable nor the older executor.
    may_be_ours = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    if parallel.distributed_executor_backend == "ray" and may_be_ours:
        # The class and not its path, which vLLM would take for an executor without Ray (`use_ray`).
        parallel.distributed_executor_backend = resolve_obj_by_qualname(RAY_EXECUTOR)
    write_speculative_config(engine_args, mode)
    manager = engine_args.disable_hybrid_kv_cache_manager
    if mode.runner == "v1" and manager is None and not is_hybrid:
        engine_args.disable_hybrid_kv_cache_manager = True
    resolve_obj_by_qualname(SHOW_FIGURES)()  # hook 17
    resolve_obj_by_qualname(REFUSE_REQUESTS)()  # hook 20


def register_draft_model(kind: type | str = DRAFT_MODEL) -> None:
    """Hook 6, in the front end and in every worker."""
    from vllm.model_executor.models.registry import ModelRegistry

    from vllm_dflash.checkpoint.spec import ARCHITECTURE

    ModelRegistry.register_model(ARCHITECTURE, kind)
