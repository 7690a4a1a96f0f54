"""Decides which engines and which requests may have draft trees. All others get chains."""

from __future__ import annotations

from importlib.metadata import entry_points

from vllm import envs
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams

NEED_CHAINS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "logprobs",
    "logprob_token_ids",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "extra_args",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
)
"""Settings with which sampling depends on more than the row's logits, or vLLM's sampler expects a
request's rows to be consecutive tokens."""
PLAIN = SamplingParams()


def may_branch(params: SamplingParams | None) -> bool:
    """Whether a request's drafts may be a tree."""
    return params is not None and all(
        getattr(params, name, None) == getattr(PLAIN, name, None) for name in NEED_CHAINS
    )


def trees_unsupported_reason(config: VllmConfig) -> str | None:
    """Reason why no drafts of an engine can be trees, whatever its layers; None if they can.

    Reasons that follow from its settings alone are found before it starts: `config/pair.py`.
    """
    parallel, speculative = config.parallel_config, config.speculative_config
    assert speculative is not None
    for is_so, why in (
        (getattr(parallel, "use_ubatching", False), "batches are run in parts"),
        (
            config.kv_transfer_config is not None,
            "a KV connector reads K/V from the cache before it is known which nodes are accepted",
        ),
        (config.model_config.uses_mrope, "the target's positions have several dimensions"),
        (
            getattr(getattr(config, "aux_output_config", None), "enabled", False),
            "routed experts are returned for consecutive rows",
        ),
        (
            bool(config.model_config.logits_processors)
            or bool(entry_points(group="vllm.logits_processors")),  # vLLM finds these by itself
            "logits processors need a request's rows to be consecutive tokens",
        ),
        (
            speculative.rejection_sample_method != "standard",
            f"rejection_sample_method is {speculative.rejection_sample_method!r}",
        ),
        (
            getattr(parallel, "enable_batch_sharded_sampling", False),
            "enable_batch_sharded_sampling is on",
        ),
        (getattr(config.model_config, "return_sampling_mask", False), "return_sampling_mask is on"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "contexts are split among ranks",
        ),
        (
            envs.VLLM_BATCH_INVARIANT,
            "sums over a context depend on who else is in the batch (VLLM_BATCH_INVARIANT)",
        ),
        (
            config.compilation_config.pass_config.fuse_attn_quant,
            "attention quantises its output",
        ),
        (config.cache_config.kv_sharing_fast_prefill, "kv_sharing_fast_prefill is on"),
        (
            config.model_config.rswa_window is not None,
            "windows count from the end of the prompt",
        ),
    ):
        if is_so:
            return why
    return None
