"""Everything in vLLM that we rely on, by the part of us that does; imports are found in our code.

`make seams` looks it up in a release's sources, and records the parameters of what is a function.
"""

import re

SEAMS = {
    # In the process that builds the engine's config.
    "front_end": """
        vllm.engine.arg_utils: AsyncEngineArgs
        vllm.engine.arg_utils:EngineArgs. _set_default_max_num_seqs_and_batched_tokens_args
            create_load_config create_speculative_config disable_hybrid_kv_cache_manager
            enable_chunked_prefill enable_lora load_format lora_target_modules max_num_active_seqs
            scheduler_cls spec_method spec_tokens watermark_config
        vllm.config.speculative:SpeculativeConfig. _is_custom_proposer_path
            draft_load_config max_num_new_slots_for_drafting
        vllm.model_executor.models.registry: ModelRegistry.models ModelRegistry.register_model
            _LazyRegisteredModel
        vllm.parser.abstract_parser: DelegatingParser.parse_delta Parser.__init__
        vllm.transformers_utils.runai_utils: ObjectStorageModel.__init__
            ObjectStorageModel.pull_files is_runai_obj_uri
        vllm.v1.engine.detokenizer: BaseIncrementalDetokenizer.update
            IncrementalDetokenizer.from_new_request
        vllm.v1.engine.input_processor: InputProcessor.process_inputs
        vllm.v1.metrics.loggers: AggregateStatLoggerBase.__init__ AggregateStatLoggerBase.record
            PrometheusStatLogger._counter_cls StatLoggerBase.log_engine_initialized
            StatLoggerManager.__init__
        vllm.v1.metrics.utils: create_metric_per_engine
    """,
    "engine": """
        vllm.v1.core.sched.scheduler:Scheduler. __init__ _handle_stopped_request
            _update_after_schedule make_spec_decoding_stats update_draft_token_ids
            update_from_output
        vllm.v1.core.sched.async_scheduler:AsyncScheduler. __init__ _update_after_schedule
        vllm.v1.engine: EngineCoreOutputs.scheduler_stats
        vllm.v1.executor.multiproc_executor: MultiprocExecutor.take_draft_token_ids
        vllm.v1.metrics.stats: SchedulerStats.running_lora_adapters
    """,
    "worker": """
        vllm.v1.worker.gpu_worker:Worker. _maybe_activate_jit_monitor
            _set_draft_weight_update_target compile_or_warm_up_model execute_model init_device
            sample_tokens shutdown supports_draft_weight_updates take_draft_token_ids
        vllm.model_executor.layers.attention.attention: Attention.get_kv_cache_spec
        vllm.model_executor.layers.rotary_embedding.base:
            RotaryEmbeddingBase._match_cos_sin_cache_dtype
        vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper. __init__ forward
        vllm.v1.worker.utils:AttentionGroup. build_metadata build_metadata_for_cudagraph_capture
            create_metadata_builders
    """,
    "v1": """
        vllm.v1.worker.cpu_worker:CPUWorker. compile_or_warm_up_model execute_model init_device
            load_model sample_tokens shutdown take_draft_token_ids
        vllm.v1.worker.gpu_worker: Worker.initialize_from_config
        vllm.v1.worker.gpu_model_runner:GPUModelRunner. _dummy_run _input_fits_in_drafter
        vllm.v1.spec_decode.dflash:DFlashProposer. __init__ _create_draft_vllm_config dummy_run
        vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer. _maybe_share_embeddings
            _maybe_share_lm_head initialize_attn_backend load_model prepare_inputs_padded
            prepare_next_token_ids_padded propose
        vllm.v1.sample.rejection_sampler: RejectionSampler.__init__ RejectionSampler.forward
            RejectionSampler._get_logprobs_tensors expand_batch_to_tokens
        vllm.v1.sample.sampler:Sampler. compute_logprobs forward gather_logprobs
        vllm.v1.sample.logits_processor.builtin: MinTokensLogitsProcessor.apply
        vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder. _update_think_state
            sync_batch
        vllm.model_executor.layers.mamba.ops.cpu.gdn_attention: _spec_forward
            _unpacked_conv_weight
        vllm.v1.worker.mamba_utils: collect_mamba_copy_meta do_mamba_copy_block
            postprocess_mamba_align_gpu preprocess_mamba
        vllm._custom_ops: fused_sigmoid_gating_delta_rule_update_spec_cpu rms_norm
            rotary_embedding
    """,
    "v2": """
        vllm.v1.outputs: AsyncModelRunnerOutput.get_output
        vllm.v1.worker.gpu.model_runner:GPUModelRunner. _dummy_run prepare_attn
            prepare_dummy_attn take_draft_token_ids
        vllm.v1.worker.gpu.input_batch:InputBatch. cu_num_logits expanded_idx_mapping
            idx_mapping idx_mapping_np input_ids logits_indices max_query_len positions
            query_start_loc seq_lens
        vllm.v1.worker.gpu.async_utils: AsyncOutput.get_output async_copy_to_np stream
        vllm.utils.torch_utils: async_tensor_h2d
        vllm.v1.worker.gpu.model_states.interface: ModelState.prepare_attn
        vllm.v1.worker.gpu.sample.gumbel: gumbel_noised_argmax
        vllm.v1.worker.gpu.sample.logprob: LogprobTokenIdsState.max_num_token_ids
            compute_topk_scores
        vllm.v1.worker.gpu.sample.output:SamplerOutput. logprobs_tensors num_nans num_rejected
            num_sampled sampled_token_ids sampling_mask_tensors
        vllm.v1.worker.gpu.sample.sampler:Sampler. __call__ add_request apply_sampling_params
            apply_staged_writes
        vllm.v1.worker.gpu.sample.states: NO_LOGPROBS
        vllm.v1.worker.gpu.spec_decode.rejection_sampler: _flatten_sampled_kernel
            get_max_chunk_logits RejectionSampler.__call__
            RejectionSampler._get_logprobs_tensors RejectionSampler._verify
        vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator. __init__
            _build_uniform_attn_metadata _configure_decode_metadata_update _generate_draft
            _num_graph_context_tokens _prepare_graph_forward attn_vllm_config capture
            init_cudagraph_manager load_draft_model prepare_context_anchor propose sample_draft
            set_attn
        vllm.v1.worker.gpu.spec_decode.dflash2.speculator:CandidateSampler. __init__ sample
        vllm.v1.worker.gpu.spec_decode.dflash.cudagraph: DFlashCudaGraphManager.__init__
        vllm.v1.worker.gpu.cudagraph_utils: BatchExecutionDescriptor.uniform_token_count
            ModelCudaGraphManager.captured_token_counts build_dynamic_sd_schedule_lookup
        vllm.v1.worker.gpu.buffer_utils: StagedWriteTensor.__init__
    """,
    # Drafters that choose among candidates.
    "candidates": """
        vllm.model_executor.models.lilicorr:LiLiCorrHead. forward
            materialize_inference_buffers
        vllm.model_executor.models.qwen3_dflash2: CandidateSelector.forward
        vllm.model_executor.layers.logits_processor: LogitsProcessor.get_top_k_tokens
    """,
    "ray": """
        vllm.v1.executor.ray_executor_v2:RayExecutorV2. _build_runtime_env _init_executor
    """,
    # The executor for CPUs alone.
    "ray_cpu": """
        vllm.v1.executor.ray_executor_v2: RayExecutorV2._get_actor_resource_kwargs
            RayExecutorV2._join_monitor_thread RayExecutorV2.shutdown
            RayWorkerProc.get_node_and_physical_gpu_ids RayWorkerProc.initialize_worker
            get_bundles_sorted_by_node initialize_ray_cluster
        vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.
            _all_group_ranks_share_shm_group_name
        vllm.distributed.device_communicators.shm_broadcast: SpinCondition.wait
    """,
    # Read by `vllm-dflash bench --dataset-name`.
    # The server of `vllm-dflash demo` alone.
    "demo": """
        vllm.v1.engine.output_processor:RequestOutputCollector. __init__ get get_nowait put
    """,
    # We do not touch these, but rely on what they do.
    "watched": """
        vllm.config.speculative: SpeculativeConfig.use_eagle_block_drop
        vllm.config.vllm: VllmConfig.__post_init__
        vllm.v1.attention.backends.flash_attn: FlashAttentionMetadataBuilder
        vllm.v1.core.sched.scheduler: Scheduler.schedule
        vllm.v1.outputs: AsyncModelRunnerOutput
        vllm.v1.worker.gpu.input_batch: get_num_sampled_and_rejected
        vllm.v1.worker.gpu.model_runner:GPUModelRunner. __init__ add_requests sample
            sample_tokens
        vllm.v1.worker.gpu.sample.gumbel: gumbel_sample
        vllm.v1.worker.gpu.sample.sampler: Sampler.sample
        vllm.v1.worker.gpu.sample.states: SamplingStates.add_request
        vllm.v1.worker.gpu.spec_decode.adaptive_verification: AdaptiveVerificationManager
        vllm.v1.worker.gpu.spec_decode.rejection_sampler: RejectionSampler.__init__
            _gather_draft_sampled_kernel
        vllm.v1.worker.gpu.warmup: warmup_kernels
        vllm.v1.worker.gpu_model_runner: GPUModelRunner.__init__
        vllm.v1.worker.utils: AttentionGroup
    """,
}
"""Names by part. One that ends in `:` or `.` is a prefix of those after it."""


def paths_of(part: str) -> list[str]:
    """Paths of a part's seams, `module:attribute`, in order."""
    owner, paths = "", []
    for name in re.findall(r"\S+", SEAMS[part]):
        if name.endswith((":", ".")):
            owner = name
        else:
            paths.append(owner + name)
    return sorted(paths)
