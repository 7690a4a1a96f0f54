"""Who may have draft trees: which engines, which targets, which requests. All others get chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sampling_params import SamplingParams

from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.model.layers import BlockAttention

NEED_CHAINS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "seed",
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
"""Settings under which what is sampled depends on the tokens before it by more than the target's
logits, or vLLM's sampler takes a request's rows to be consecutive tokens."""
PLAIN = SamplingParams()


def may_branch(params: SamplingParams | None, *, draws_by_position: bool = False) -> bool:
    """Whether a request's drafts may be a tree.

    Args:
        params: of the request.
        draws_by_position: whether the runner draws a token by seed and position, so that it does
            not matter how many rows are sampled beside it.
    """
    return params is not None and all(
        getattr(params, name) == getattr(PLAIN, name) or (name == "seed" and draws_by_position)
        for name in NEED_CHAINS
    )


def granted(asked: int, room: int) -> int:
    """Nodes of a tree, if so many were asked for and vLLM has room for so many drafts."""
    if room < asked:
        logger().warning(
            "draft trees have %d tokens, not %d: vLLM has no room for more, because it was told how"
            " many to speculate, has another scheduler, or too few tokens in a step.",
            room,
            asked,
        )
    return min(asked, room)


def target_layers(config: VllmConfig, drafters: Sequence[BlockAttention]) -> dict[str, Any]:
    """Attention layers of the target by name: all but the drafter's."""
    names = {attention.attn.layer_name for attention in drafters}
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    return {name: layer for name, layer in layers.items() if name not in names}


def why_chains(
    config: VllmConfig, layers: Mapping[str, Any], can_attend: Callable[[Any], bool]
) -> str:
    """Why no drafts of an engine can be trees, on either runner; nothing if they can.

    Args:
        config: of the engine.
        layers: attention of the target.
        can_attend: whether rows of trees come out right in one of them.
    """
    assert config.speculative_config is not None
    if config.parallel_config.world_size > 1:
        return "trees are kept by each worker for itself, and this engine has several"
    if config.kv_transfer_config is not None:
        return "a connector takes K/V out of the cache before it is known which nodes are accepted"
    if config.model_config.uses_mrope:
        return "the target's positions have several dimensions"
    if config.speculative_config.rejection_sample_method == "synthetic":
        return "rejection_sample_method is 'synthetic'"
    if config.model_config.logits_processors:
        return "logits processors take the rows of a request to be consecutive tokens"
    for owner, setting in (
        (config.speculative_config, "use_local_argmax_reduction"),  # tells of one token a place
        (config.aux_output_config, "enable_return_routed_experts"),
        (config.model_config, "return_sampling_mask"),
        (config.compilation_config.pass_config, "fuse_attn_quant"),
    ):
        if getattr(owner, setting, False):
            return f"{setting} is on"
    strange = [name for name, layer in layers.items() if not can_attend(layer)]
    if strange:
        return f"attention of {strange[0]!r} is of a kind that cannot be computed for trees"
    return ""
