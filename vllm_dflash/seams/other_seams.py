"""In the front end, the engine, and with Ray."""

from __future__ import annotations

from vllm_dflash.seams.seam import Seam

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
    Seam(
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.__init__",
        "self vllm_config engine_indexes",
    ),
    Seam("vllm.v1.metrics.loggers:StatLoggerBase.log_engine_initialized", "self"),
    Seam("vllm.v1.metrics.utils:create_metric_per_engine", "metric per_engine_labelvalues"),
)
"""Used in the process that builds the engine's config."""

ENGINE = (
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        "self vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
        "mm_registry include_finished_set log_stats",
    ),
    Seam("vllm.v1.core.sched.async_scheduler:AsyncScheduler.__init__", "self args kwargs"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.add_request", "self request"),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
        "self spec_decoding_stats num_draft_tokens num_accepted_tokens num_invalid_spec_tokens "
        "request_id",
    ),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.shutdown", "self"),
    Seam("vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids", "self"),
    Seam(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "self scheduler_output model_runner_output",
    ),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids", "self draft_token_ids"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule", "self scheduler_output"),
    Seam(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule",
        "self scheduler_output",
    ),
    Seam("vllm.v1.engine:EngineCoreOutputs.scheduler_stats"),
    Seam("vllm.v1.metrics.stats:SchedulerStats.__dataclass_fields__.running_lora_adapters"),
)
"""Used in the engine's process."""

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
