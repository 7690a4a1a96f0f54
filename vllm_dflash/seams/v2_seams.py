"""In workers with Model Runner V2."""

from __future__ import annotations

from vllm_dflash.seams.seam import Seam
from vllm_dflash.seams.v1_seams import BOTH_WORKERS

V2 = "vllm.v1.worker.gpu"

SPECULATOR = f"{V2}.spec_decode.dflash.speculator:DFlashSpeculator"

BUDGET = f"{V2}.spec_decode.adaptive_verification:AdaptiveVerificationManager"

V2_WORKER = (
    Seam(f"{SPECULATOR}.observe_verification", "self idx_mapping num_sampled num_rejected"),
    Seam(f"{BUDGET}.get_num_tokens", "self num_tokens_per_req draft_tokens"),
    Seam(f"{BUDGET}.add_request", "self req_idx"),
    Seam(f"{BUDGET}.record_confidences", "self confidence_probs input_batch"),
    Seam(
        f"{V2}.spec_decode.adaptive_verification:_assign_draft_token_budget",
        "confidence_probs idx_mapping capacities draft_budget num_steps",
    ),
    Seam(f"{SPECULATOR}.capture", "self"),
    Seam(f"{BUDGET}.reallocate_drafts", "self req_ids idx_mapping"),
    Seam(
        f"{V2}.buffer_utils:StagedWriteTensor.__init__",
        "self size dtype device max_concurrency uva_instead_of_gpu",
    ),
    *BOTH_WORKERS,
    Seam("vllm.v1.outputs:AsyncModelRunnerOutput.get_output", "self"),
    Seam("vllm.v1.outputs:AsyncModelRunnerOutput.get_kv_connector_output", "self", ">=0.33"),
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
