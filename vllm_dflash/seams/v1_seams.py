"""In workers: what both model runners share, and what the V1 runner has."""

from __future__ import annotations

from vllm_dflash.seams.seam import Seam

NATIVE = "vllm.v1.spec_decode.dflash:DFlashProposer"

PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

WORKER = "vllm.v1.worker.gpu_worker:Worker"

ATTENTION = "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl"

BOTH_WORKERS = (
    Seam(f"{WORKER}.init_device", "self"),
    Seam(f"{WORKER}.compile_or_warm_up_model", "self"),
    Seam(f"{WORKER}.execute_model", "self scheduler_output"),
    Seam(f"{WORKER}.sample_tokens", "self grammar_output"),
    Seam(f"{WORKER}.take_draft_token_ids", "self"),
    Seam(f"{WORKER}.shutdown", "self"),
    Seam(
        "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
        "self vllm_config",
    ),
    Seam(
        "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.__init__",
        "self compile_prefix is_encoder",
    ),
    Seam("vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.forward", "self args kwargs"),
)
"""Used in a worker with either model runner."""

V1_WORKER = (
    *BOTH_WORKERS,
    Seam(f"{NATIVE}.__init__", "self vllm_config device runner"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.init_device", "self"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.load_model", "self load_dummy_weights"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.shutdown", "self"),
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
    Seam(f"{PROPOSER}.load_model", "self target_model"),
    Seam(
        "vllm.v1.worker.utils:AttentionGroup.build_metadata",
        "self common_attn_metadata ubatch_idx common_prefix_len kwargs",
    ),
    Seam(
        "vllm.v1.worker.utils:AttentionGroup.build_metadata_for_cudagraph_capture",
        "self common_attn_metadata ubatch_idx",
    ),
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

STEP_TIMES = (
    Seam(f"{RUNNER}._model_forward"),
    Seam(f"{RUNNER}.propose_draft_token_ids"),
    Seam(f"{RUNNER}._copy_draft_token_ids_to_cpu"),
    Seam(f"{RUNNER}.take_draft_token_ids"),
    Seam(f"{RUNNER}.sample_tokens"),
)
"""Timed by `vllm-dflash bench`, with whatever arguments they have."""
