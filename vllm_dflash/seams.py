"""Everything in vLLM that we rely on, by signature; `compatibility.py` checks it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED_VLLM = SpecifierSet(">=0.32.0,<0.34")
"""Versions that tests run with."""


class UnsupportedVllmError(RuntimeError):
    """vllm-dflash was not built for this vLLM; the message names what differs."""


def parse_version(version: str) -> Version:
    """Parse a version; an invalid one counts as the newest."""
    try:
        return Version(version)
    except InvalidVersion:
        return Version("9999")


@dataclass(frozen=True)
class Seam:
    """A function or attribute of vLLM that a hook of ours depends on."""

    path: str
    """`module:attribute`. The attribute may have dots."""
    parameters: str | None = None
    """Parameter names, in order; None if it is not called. Those with ? may be missing."""
    versions: str = ""
    """vLLM versions that have it: a specifier such as `>=0.33`. Empty: all that we support."""

    def is_in(self, version: str) -> bool:
        """Whether this vLLM version should have it."""
        return SpecifierSet(self.versions).contains(parse_version(version).base_version)

    def accepts(self, parameters: str | None) -> bool:
        """Whether these match. A source's methods have `self` or `cls`, which may be left out."""
        if self.parameters is None:
            return True
        found, names = (parameters or "").split(), self.parameters.split()
        kept = [name for name in names if name[-1] != "?" or name[:-1] in found]
        expected = [name.removesuffix("?") for name in kept]
        return found == expected or (found[:1] in (["self"], ["cls"]) and found[1:] == expected)


Seams = tuple[Seam, ...]


def _listed(text: str) -> Seams:
    """Seams from one line each: `module:name(parameters) versions`, without parentheses if it is
    not called. A line that ends in `module:` or `module:Class.` is a prefix of those below it."""
    owner, seams = "", []
    for line in re.sub(r"\n {8}", " ", text).splitlines():  # eight spaces continue a line
        if line.endswith((":", ".")):
            owner = line
            continue
        name, parenthesis, rest = line.strip().partition("(")
        parameters, _, versions = rest.partition(")")
        path = name if ":" in name else owner + name
        seams.append(Seam(path, parameters if parenthesis else None, versions.strip()))
    return tuple(seams)


FRONT_END = _listed("""\
vllm.engine.arg_utils:AsyncEngineArgs
vllm.engine.arg_utils:EngineArgs.
    _set_default_max_num_seqs_and_batched_tokens_args(self usage_context model_config
        parallel_config)
    create_speculative_config(self target_model_config target_parallel_config)
    disable_hybrid_kv_cache_manager
    enable_chunked_prefill
    enable_lora
    load_format
    lora_target_modules
    max_num_active_seqs
    scheduler_cls
    spec_method
    spec_tokens
    watermark_config
vllm.config.speculative:SpeculativeConfig._is_custom_proposer_path(model)
vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting
vllm.model_executor.models.registry:
    ModelRegistry.models
    ModelRegistry.register_model(model_arch model_cls)
    _LazyRegisteredModel
vllm.parser.abstract_parser:
    DelegatingParser.parse_delta(self delta_text delta_token_ids request prompt_token_ids finished)
    Parser.__init__(self tokenizer tools args model_config kwargs)
vllm.transformers_utils.runai_utils:
    ObjectStorageModel.__init__(self url)
    ObjectStorageModel.pull_files(self model_path allow_pattern ignore_pattern)
    is_runai_obj_uri(model_or_path)
vllm.v1.engine.detokenizer:
    BaseIncrementalDetokenizer.update(self new_token_ids stop_terminated)
    IncrementalDetokenizer.from_new_request(tokenizer request)
vllm.v1.engine.input_processor:InputProcessor.process_inputs
vllm.v1.metrics.loggers:
    AggregateStatLoggerBase.__init__(self vllm_config engine_indexes)
    AggregateStatLoggerBase.record(self scheduler_stats iteration_stats mm_cache_stats engine_idx)
    PrometheusStatLogger._counter_cls
    StatLoggerBase.log_engine_initialized(self)
    StatLoggerManager.__init__(self vllm_config engine_idxs custom_stat_loggers
        enable_default_loggers aggregate_engine_logging client_count)
vllm.v1.metrics.utils:create_metric_per_engine(metric per_engine_labelvalues)
""")
"""Used in the process that builds the engine's config."""

ENGINE = _listed("""\
vllm.v1.core.sched.scheduler:Scheduler.
    __init__(self vllm_config kv_cache_config structured_output_manager block_size hash_block_size
        mm_registry include_finished_set log_stats)
    _handle_stopped_request(self request)
    _update_after_schedule(self scheduler_output)
    make_spec_decoding_stats(self spec_decoding_stats num_draft_tokens num_accepted_tokens
        num_invalid_spec_tokens request_id)
    update_draft_token_ids(self draft_token_ids)
    update_from_output(self scheduler_output model_runner_output)
vllm.v1.core.sched.async_scheduler:AsyncScheduler.
    __init__(self args kwargs)
    _update_after_schedule(self scheduler_output)
vllm.v1.engine:EngineCoreOutputs.scheduler_stats
vllm.v1.executor.multiproc_executor:MultiprocExecutor.take_draft_token_ids(self)
vllm.v1.metrics.stats:SchedulerStats.running_lora_adapters
""")
"""Used in the engine's process."""

BOTH_WORKERS = _listed("""\
vllm.v1.worker.gpu_worker:Worker.
    _maybe_activate_jit_monitor(self)
    _set_draft_weight_update_target(self)
    compile_or_warm_up_model(self)
    execute_model(self scheduler_output)
    init_device(self)
    sample_tokens(self grammar_output)
    shutdown(self)
    supports_draft_weight_updates(self)
    take_draft_token_ids(self)
vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec(self vllm_config)
vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase.
    _match_cos_sin_cache_dtype(self query)
vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.
    __init__(self compile_prefix is_encoder)
    forward(self args kwargs)
""")
"""Used in a worker with either model runner."""

V1_WORKER = BOTH_WORKERS + _listed("""\
vllm.v1.worker.cpu_worker:CPUWorker.
    compile_or_warm_up_model(self)
    execute_model(self scheduler_output)
    init_device(self)
    load_model(self load_dummy_weights)
    sample_tokens(self grammar_output)
    shutdown(self)
    take_draft_token_ids(self)
vllm.v1.worker.gpu_worker:Worker.initialize_from_config(self kv_cache_config)
vllm.v1.worker.gpu_model_runner:GPUModelRunner.
    _dummy_run(self num_tokens cudagraph_runtime_mode force_attention uniform_decode
        allow_microbatching skip_eplb is_profile create_mixed_batch remove_lora is_graph_capturing
        num_active_loras profile_seq_lens randomize_inputs)
    _input_fits_in_drafter(self common_attn_metadata)
vllm.v1.spec_decode.dflash:DFlashProposer.
    __init__(self vllm_config device runner)
    _create_draft_vllm_config(self)
    dummy_run(self num_tokens use_cudagraphs is_graph_capturing slot_mappings)
vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.
    _maybe_share_embeddings(self target_language_model)
    _maybe_share_lm_head(self target_language_model)
    initialize_attn_backend(self kv_cache_config kernel_block_sizes)
    load_model(self target_model)
    prepare_inputs_padded(self common_attn_metadata spec_decode_metadata valid_sampled_tokens_count)
    prepare_next_token_ids_padded(self sampled_token_ids requests gpu_input_batch
        discard_request_mask)
    propose(self num_speculative_tokens target_token_ids target_positions target_hidden_states
        next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata
        mm_embed_inputs num_rejected_tokens_gpu slot_mappings)
vllm.v1.worker.utils:AttentionGroup.
    build_metadata(self common_attn_metadata ubatch_idx common_prefix_len kwargs)
    build_metadata_for_cudagraph_capture(self common_attn_metadata ubatch_idx)
    create_metadata_builders(self vllm_config device kernel_block_size num_metadata_builders)
vllm.v1.sample.rejection_sampler:
    RejectionSampler.__init__(self sampler spec_config device)
    RejectionSampler.forward(self metadata draft_probs logits sampling_metadata)
    RejectionSampler._get_logprobs_tensors(self max_num_logprobs metadata logits target_logits
        bonus_logits sampled_token_ids)
    expand_batch_to_tokens(x cu_num_tokens num_tokens replace_from replace_to)
vllm.v1.sample.sampler:Sampler.
    compute_logprobs(logits)
    forward(self logits sampling_metadata predict_bonus_token logprobs_mode_override)
    gather_logprobs(logprobs num_logprobs token_ids)
vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply(self logits)
vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.
    _update_think_state(self state)
    sync_batch(self batch_update)
vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:
    _spec_forward(layer attn_metadata_i mixed_qkv_spec b_spec a_spec conv_buf ssm_state width
        state_len)
    _unpacked_conv_weight(layer)
vllm.v1.worker.mamba_utils:
    collect_mamba_copy_meta(copy_bufs kv_cache_config mamba_state_copy_funcs mamba_group_ids
        src_block_idx dest_block_idx accept_token_bias req_state forward_context)
    do_mamba_copy_block(copy_bufs)
    postprocess_mamba_align_gpu(bufs num_reqs num_accepted_tokens_gpu num_accepted_tokens_cpu_tensor
        input_batch kv_cache_config forward_context mamba_state_copy_funcs)
    preprocess_mamba(scheduler_output kv_cache_config cache_config mamba_state_idx input_batch
        requests forward_context mamba_state_copy_funcs copy_bufs align_ctx)
vllm._custom_ops:
    fused_sigmoid_gating_delta_rule_update_spec_cpu(A_log dt_bias q k v a b initial_state_source
        spec_state_indices num_accepted_tokens cu_seqlens use_qk_l2norm_in_kernel softplus_beta
        softplus_threshold)
    rms_norm(out input weight epsilon)
    rotary_embedding(positions query key head_size cos_sin_cache is_neox rope_dim_offset inverse)
""")
"""Used in a worker with the V1 model runner."""

V2_WORKER = BOTH_WORKERS + _listed("""\
vllm.v1.outputs:AsyncModelRunnerOutput.
    get_output(self)
    get_kv_connector_output(self) >=0.33
vllm.v1.worker.gpu.model_runner:GPUModelRunner.
    _dummy_run(self num_tokens args skip_attn uniform_decode context_len skip_eplb is_profile
        valid_dummy_state_slots randomize_inputs kwargs)
    prepare_attn(self input_batch)
    prepare_dummy_attn(self input_batch valid_state_slots)
    take_draft_token_ids(self)
vllm.v1.worker.gpu.input_batch:InputBatch.
    cu_num_logits
    expanded_idx_mapping
    idx_mapping
    idx_mapping_np
    input_ids
    logits_indices
    max_query_len
    positions
    query_start_loc
    seq_lens
vllm.v1.worker.gpu.async_utils:
    AsyncOutput.get_output(self)
    async_copy_to_np(x)
    stream(to_stream from_stream)
vllm.utils.torch_utils:async_tensor_h2d(data device dtype out)
vllm.v1.worker.gpu.model_states.interface:ModelState.prepare_attn(self input_batch cudagraph_mode
        block_tables slot_mappings attn_groups kv_cache_config for_capture ubatch_idx)
vllm.v1.worker.gpu.sample.gumbel:gumbel_noised_argmax(logits keys mask seed pos temp IS_DRAFTING
        USE_FP64 APPLY_TEMPERATURE)
vllm.v1.worker.gpu.sample.output:SamplerOutput.
    logprobs_tensors
    num_nans
    num_rejected
    num_sampled
    sampled_token_ids
    sampling_mask_tensors
vllm.v1.worker.gpu.sample.sampler:Sampler.
    __call__(self logits input_batch)
    add_request(self req_idx sampling_params)
    apply_sampling_params(self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids
        expanded_local_pos seq_lens_upper_bound_np skip_top_k_top_p)
    apply_staged_writes(self)
vllm.v1.worker.gpu.sample.states:NO_LOGPROBS
vllm.v1.worker.gpu.spec_decode.rejection_sampler:get_max_chunk_logits(vocab_size)
vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.
    __call__(self logits input_batch draft_logits invalid_drafts)
    _verify(self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np
        expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled)
    _get_logprobs_tensors(self sampled num_sampled logits cu_num_logits cu_num_logits_np
        max_num_logprobs)
vllm.v1.worker.gpu.spec_decode.rejection_sampler:_flatten_sampled_kernel
vllm.v1.worker.gpu.sample.logprob:
    LogprobTokenIdsState.max_num_token_ids(self idx_mapping_np)
    compute_topk_scores(logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state
        expanded_idx_mapping max_per_req_token_ids logits_mode)
vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.
    __init__(self vllm_config device)
    attn_vllm_config
    _configure_decode_metadata_update(self)
    _build_uniform_attn_metadata(self batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound
        step causal dcp_local_seq_lens)
    _generate_draft(self num_reqs num_tokens_padded attn_metadata slot_mappings num_tokens_across_dp
        cudagraph_runtime_mode)
    _num_graph_context_tokens(self num_reqs)
    _prepare_graph_forward(self num_reqs attn_metadata)
    capture(self)
    init_cudagraph_manager(self cudagraph_mode)
    load_draft_model(self target_model target_attn_layer_names)
    prepare_context_anchor(self input_batch? num_reqs? query_start_loc? num_rejected)
    propose(self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states
        num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state
        dummy_run skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens)
    sample_draft(self hidden_states sample_src_positions idx_mapping temperature seeds draft_step
        draft_logits spec_step_idx num_steps?)
    set_attn(self model_state kv_cache_config block_tables target_input_buffers target_attn_groups)
vllm.v1.worker.gpu.spec_decode.dflash2.speculator:CandidateSampler.
    __init__(self max_num_reqs num_steps top_k device)
    sample(self candidate_ids scores num_reqs sample_pos idx_mapping temperature seeds draft_tokens
        draft_logits use_fp64)
vllm.v1.worker.gpu.cudagraph_utils:
    BatchExecutionDescriptor.uniform_token_count
    ModelCudaGraphManager.captured_token_counts(self)
    build_dynamic_sd_schedule_lookup(num_speculative_tokens_per_batch_size vllm_max_batch_size
        vllm_num_speculative_tokens)
vllm.v1.worker.gpu.spec_decode.dflash.cudagraph:DFlashCudaGraphManager.
    __init__(self vllm_config device cudagraph_mode decode_query_len lora_capture_cases
        varlen_decode ubatch_runner)
vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.
    __init__(self size dtype device max_concurrency uva_instead_of_gpu)
""")
"""Used in a worker with Model Runner V2."""

LILICORR = _listed("""\
vllm.model_executor.models.lilicorr:LiLiCorrHead.
    forward(self token_embeddings candidate_log_probs pass_hidden anchor_hidden anchor_valid)
    materialize_inference_buffers(self device dtype)
vllm.model_executor.layers.logits_processor:LogitsProcessor.
    get_top_k_tokens(self lm_head hidden_states k embedding_bias return_log_probs)
""")
"""Used in a worker with a LiLiCorr drafter."""

RAY_EXECUTOR = _listed("""\
vllm.v1.executor.ray_executor_v2:RayExecutorV2.
    _build_runtime_env(self)
    _init_executor(self)
""")
"""Used in the engine's process with any Ray backend."""

RAY_CPU = RAY_EXECUTOR + _listed("""\
vllm.v1.executor.ray_executor_v2:
    RayExecutorV2._get_actor_resource_kwargs()
    RayExecutorV2._join_monitor_thread(self)
    RayExecutorV2.shutdown(self)
    RayWorkerProc.get_node_and_physical_gpu_ids(self)
    RayWorkerProc.initialize_worker(self local_rank env_vars distributed_init_method driver_env_vars
        assigned_physical_gpu_ids)
    get_bundles_sorted_by_node(placement_group)
    initialize_ray_cluster
vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.
    _all_group_ranks_share_shm_group_name(self)
vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait(self timeout_ms)
""")
"""Used in the engine's process and in the workers with our Ray executor for CPUs."""

DEMO_SERVER = _listed("""\
vllm.v1.engine.output_processor:
    RequestOutputCollector.__init__(self output_kind request_id)
    RequestOutputCollector.put(self output)
    RequestOutputCollector.get(self)
    RequestOutputCollector.get_nowait(self)
""")
"""Used by the servers of `vllm-dflash demo`."""

SEAMS = (FRONT_END, ENGINE, V1_WORKER, V2_WORKER, LILICORR, RAY_EXECUTOR, RAY_CPU, DEMO_SERVER)
"""Every seam: all that this package needs of a vLLM release."""
