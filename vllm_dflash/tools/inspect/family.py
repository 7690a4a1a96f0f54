"""Which of the known families of drafters a drafter looks like."""

from __future__ import annotations

from vllm_dflash.checkpoint.spec import DrafterSpec


def resembles(spec: DrafterSpec) -> str:
    """The family with this layout, and what it was recognised by.

    A guess for people, from the shape alone: nothing in the package depends on it.
    """
    rope = spec.rope_parameters["rope_type"]
    sliding = sum(window is not None for window in spec.windows)
    layers = f"{sliding} of {spec.num_layers} layers sliding"
    if spec.dflash2 is not None:
        return f"DFlash 2 ({spec.num_layers} layers, {len(spec.taps)} taps)"
    if spec.length_heads:
        return f"AdaFlash (a length head, {spec.length_heads[0]})"
    if spec.attention_sinks or spec.value_scale is not None:
        return "MiMo (attention sinks or a value scale)"
    if spec.draft_vocab_size != spec.vocab_size:
        return f"speculators (a vocabulary of its own, {spec.draft_vocab_size} tokens)"
    if spec.attention_bias:
        return f"gpt-oss (biases, heads of {spec.head_dim}, rotation {rope})"
    if rope == "yarn":
        return f"Kimi-K2.5 (YaRN, {spec.num_layers} layers, {len(spec.taps)} taps)"
    if sliding and len(spec.taps) >= 6:
        return f"gemma-4 ({layers}, {len(spec.taps)} taps)"
    if sliding:
        return f"Qwen3.5/3.6 ({layers})"
    if rope == "llama3":
        return f"LLaMA-3.1 (rotation llama3, block {spec.block_size})"
    return f"Qwen3 (full attention, block {spec.block_size}, {len(spec.taps)} taps)"
