"""The parts of vLLM we rely on, checked by version and by signature."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vllm_dflash.vllms_own import SWITCH_OFF

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34")


class UnsupportedVllmError(RuntimeError):
    """This vLLM is not one vllm-dflash was built for; the message names what differs."""


@dataclass(frozen=True)
class Seam:
    """A function or attribute of vLLM that a hook of ours depends on."""

    path: str
    """`module:attribute`, dots allowed in the attribute, and keys of a dictionary among them."""
    parameters: str | None = None
    """Names of the parameters we pass or receive, in order; None for what is not called. One with
    a question mark is not there in every version."""
    versions: str = ""
    """Of vLLM, that have it: a specifier such as `>=0.33`. Empty: all that we support."""

    def is_in(self, version: str) -> bool:
        """Whether this version of vLLM is to have it."""
        return SpecifierSet(self.versions).contains(Version(version).base_version)

    def accepts(self, found: Sequence[str]) -> bool:
        """Whether a function with these parameters will do."""
        if self.parameters is None:
            return True
        names = self.parameters.split()
        return list(found) == [
            name.removesuffix("?") for name in names if name[-1] != "?" or name[:-1] in found
        ]


NATIVE = "vllm.v1.spec_decode.dflash:DFlashProposer"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

FRONT_END = (
    Seam(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        "self target_model_config target_parallel_config",
    ),
    Seam(
        "vllm.model_executor.models.registry:ModelRegistry.register_model", "model_arch model_cls"
    ),
    Seam(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        "self vllm_config engine_idxs custom_stat_loggers enable_default_loggers "
        "aggregate_engine_logging client_count",
    ),
    Seam("vllm.v1.metrics.loggers:PrometheusStatLogger._counter_cls"),
    Seam(
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record",
        "self scheduler_stats iteration_stats mm_cache_stats engine_idx",
    ),
    Seam("vllm.v1.metrics.utils:create_metric_per_engine", "metric per_engine_labelvalues"),
)
"""Used in the process that builds the engine's config."""

V1_WORKER = (
    Seam(f"{NATIVE}.__init__", "self vllm_config device runner"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "self"),
    Seam(f"{RUNNER}._input_fits_in_drafter", "self common_attn_metadata"),
    Seam(
        f"{PROPOSER}.propose",
        "self num_speculative_tokens target_token_ids target_positions "
        "target_hidden_states next_token_ids token_indices_to_sample common_attn_metadata "
        "sampling_metadata mm_embed_inputs num_rejected_tokens_gpu slot_mappings",
    ),
    Seam(
        f"{PROPOSER}.prepare_next_token_ids_padded",
        "self sampled_token_ids requests gpu_input_batch discard_request_mask",
    ),
    Seam(
        f"{PROPOSER}.prepare_inputs_padded",
        "self common_attn_metadata spec_decode_metadata valid_sampled_tokens_count",
    ),
    Seam(f"{NATIVE}.dummy_run", "self num_tokens use_cudagraphs is_graph_capturing slot_mappings"),
    Seam(f"{PROPOSER}.initialize_attn_backend", "self kv_cache_config kernel_block_sizes"),
    Seam(
        "vllm.v1.worker.utils:AttentionGroup.build_metadata_for_drafting",
        "self common_attn_metadata draft_index",
    ),
    Seam(
        "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
        "self vllm_config device kernel_block_size num_metadata_builders",
    ),
    Seam(f"{NATIVE}._create_draft_vllm_config", "self"),
    Seam(f"{PROPOSER}._maybe_share_embeddings", "self target_language_model"),
    Seam(f"{PROPOSER}._maybe_share_lm_head", "self target_language_model"),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.__init__",
        "self sampler spec_config device",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        "self metadata draft_probs logits sampling_metadata",
    ),
    Seam(
        "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        "x cu_num_tokens num_tokens replace_from replace_to",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        "self num_tokens cudagraph_runtime_mode force_attention uniform_decode "
        "allow_microbatching skip_eplb is_profile create_mixed_batch remove_lora "
        "is_graph_capturing num_active_loras profile_seq_lens randomize_inputs",
    ),
    Seam("vllm.v1.worker.gpu_worker:Worker.initialize_from_config", "self kv_cache_config"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.execute_model", "self scheduler_output"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens", "self grammar_output"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.take_draft_token_ids", "self"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model", "self"),
    Seam("vllm._custom_ops:rms_norm", "out input weight epsilon"),
    Seam(
        "vllm._custom_ops:rotary_embedding",
        "positions query key head_size cos_sin_cache is_neox rope_dim_offset inverse",
    ),
)
"""Used in a worker with the V1 model runner."""

ENGINE = (
    Seam("vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids", "self"),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
    ),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids", "self draft_token_ids"),
    Seam(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "self scheduler_output",
    ),
    Seam("vllm.v1.engine:EngineCoreOutputs.scheduler_stats"),
    Seam("vllm.v1.metrics.stats:SchedulerStats.__dataclass_fields__.running_lora_adapters"),
)
"""Used in the engine's process."""


V2 = "vllm.v1.worker.gpu"
SPECULATOR = f"{V2}.spec_decode.dflash.speculator:DFlashSpeculator"

V2_WORKER = (
    Seam(f"{SPECULATOR}.__init__", "self vllm_config device"),
    Seam(
        f"{SPECULATOR}.propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states "
        "aux_hidden_states num_sampled num_rejected last_sampled next_prefill_tokens "
        "temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs "
        "is_profile num_speculative_tokens",
    ),
    Seam(f"{SPECULATOR}.load_draft_model", "self target_model target_attn_layer_names"),
    Seam(
        f"{SPECULATOR}.set_attn",
        "self model_state kv_cache_config block_tables target_input_buffers target_attn_groups",
    ),
    Seam(
        f"{SPECULATOR}._generate_draft",
        "self num_reqs num_tokens_padded attn_metadata slot_mappings num_tokens_across_dp "
        "cudagraph_runtime_mode",
    ),
    Seam(
        f"{SPECULATOR}._build_uniform_attn_metadata",
        "self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound step causal "
        "dcp_local_seq_lens",
    ),
    Seam(
        f"{SPECULATOR}.sample_draft",
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step "
        "draft_logits spec_step_idx num_steps?",  # from 0.33 on
    ),
    Seam(f"{SPECULATOR}._maybe_predict_acceptance", "self logits idx_mapping draft_step"),
    Seam(
        f"{V2}.spec_decode.dflash2.speculator:CandidateSampler.__init__",
        "self max_num_reqs num_steps top_k device",
    ),
    Seam(
        f"{V2}.spec_decode.dflash2.speculator:CandidateSampler.sample",
        "self candidate_ids scores num_reqs sample_pos idx_mapping temperature seeds draft_tokens "
        "draft_logits use_fp64",
    ),
    Seam(
        f"{V2}.model_runner:GPUModelRunner._dummy_run",
        "self num_tokens args skip_attn uniform_decode context_len skip_eplb is_profile "
        "valid_dummy_state_slots randomize_inputs kwargs",
    ),
    Seam(f"{V2}.model_runner:GPUModelRunner.take_draft_token_ids", "self"),
    Seam(f"{SPECULATOR}.init_cudagraph_manager", "self cudagraph_mode"),
    Seam(
        f"{V2}.attn_utils:get_query_lens_mismatch_unsupported_backend",
        "attn_groups checked_layer_names",
    ),
    Seam(
        f"{V2}.attn_utils:get_varlen_cudagraph_unsupported_backend",
        "attn_groups vllm_config max_query_len checked_layer_names",
    ),
    Seam(f"{V2}.attn_utils:get_attn_cg_support", "attn_groups vllm_config checked_layer_names"),
)
"""Used in a worker with Model Runner V2."""

V2_GRAPHS = (
    Seam(
        f"{V2}.cudagraph_utils:CudaGraphManager.__init__",
        "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode "
        "ubatch_runner",
    ),
    Seam(
        "vllm.config.compilation:CompilationConfig.resolve_cudagraph_mode_and_sizes",
        "self min_cg_support min_cg_attn_backend uniform_decode_query_len use_v2_model_runner "
        "kv_cache_config max_num_reqs is_profiling piecewise_capture_available",
    ),
)
"""Asked by `vllm-dflash inspect` on CUDA, for the list of graphs."""


RAY = "vllm.v1.executor.ray_executor_v2"

RAY_EXECUTOR = (
    Seam(f"{RAY}:RayExecutorV2._init_executor", "self"),
    Seam(f"{RAY}:RayExecutorV2._build_runtime_env", "self"),
)
"""Used in the engine's process with any Ray backend."""

RAY_CPU = (
    *RAY_EXECUTOR,
    Seam(f"{RAY}:RayExecutorV2._get_actor_resource_kwargs", ""),
    Seam(f"{RAY}:RayExecutorV2._join_monitor_thread", "self"),
    Seam(f"{RAY}:RayExecutorV2.shutdown", "self"),
    Seam(f"{RAY}:RayWorkerProc.get_node_and_physical_gpu_ids", "self"),
    Seam(
        f"{RAY}:RayWorkerProc.initialize_worker",
        "self local_rank env_vars distributed_init_method driver_env_vars "
        "assigned_physical_gpu_ids",
    ),
    Seam(f"{RAY}:initialize_ray_cluster"),
    Seam(f"{RAY}:get_bundles_sorted_by_node", "placement_group"),
    Seam(
        "vllm.distributed.device_communicators.cpu_communicator:"
        "CpuCommunicator._all_group_ranks_share_shm_group_name",
        "self",
    ),
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait", "self timeout_ms"
    ),
)
"""Used in the engine's process and in the workers with our Ray executor for CPUs."""


def check_vllm(seams: tuple[Seam, ...]) -> None:
    """Stop, by name, where this vLLM is not the one our hooks were written for."""
    import vllm

    check_version(vllm.__version__)
    check_seams(seams)


def check_version(version: str) -> None:
    """Refuse a vLLM outside `SUPPORTED_VLLM`. Raises `UnsupportedVllmError`."""
    try:
        supported = Version(version).public in SUPPORTED_VLLM
    except InvalidVersion:
        supported = False
    if not supported:
        from vllm_dflash import __version__

        raise UnsupportedVllmError(
            f"vllm-dflash {__version__} supports vLLM {SUPPORTED_VLLM}, this is vLLM {version}."
            f" Install a matching pair. {SWITCH_OFF}."
        )


def check_seams(seams: tuple[Seam, ...]) -> None:
    """Refuse a vLLM whose functions have changed. Raises `UnsupportedVllmError`."""
    import vllm

    for seam in seams:
        if seam.versions and not seam.is_in(vllm.__version__):
            continue
        module, _, attribute = seam.path.partition(":")
        try:
            target: Any = import_module(module)
            for name in attribute.split("."):
                target = target[name] if isinstance(target, dict) else getattr(target, name)
        except (ImportError, AttributeError, KeyError) as error:
            raise UnsupportedVllmError(
                f"vllm-dflash relies on {seam.path}, which this vLLM does not have ({error})."
                f" {SWITCH_OFF}."
            ) from error
        if seam.parameters is None:
            continue
        found = list(inspect.signature(target).parameters)
        if not seam.accepts(found):
            expected = seam.parameters.split()
            raise UnsupportedVllmError(
                f"vllm-dflash relies on {seam.path}({', '.join(expected)}), but this vLLM"
                f" has {attribute.rpartition('.')[2]}({', '.join(found)})."
                f" {SWITCH_OFF}."
            )
