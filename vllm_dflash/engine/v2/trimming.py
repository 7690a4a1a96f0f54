"""Which draft lengths CUDA graphs allow, asked where it is known.

vLLM's adaptive verification trims each request's drafts on the device, in graphs that take ragged
batches. Whether those can be captured depends on the backend of every attention layer, which is
chosen while the models are loaded. Who copies the setting (the acceptance estimator, the rejection
sampler, metadata builders) does so after the drafter is loaded; so that is when it is decided here.
Where it does not hold, graphs are there for a few lengths (`config/engine_settings.py`): all
requests of a step take one of these, or run in pieces; without full graphs, any length will do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import (
    get_attn_cg_support,
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.agreement import agreed_by_all

Layers = Mapping[str, AttentionLayerBase]


def why_untrimmed(config: VllmConfig, target_names: Collection[str]) -> str | None:
    """Why this engine's drafts are not trimmed on the device; None where they can be, on all ranks.

    To be asked on every rank alike, when both models are loaded. `target_names` are the target's
    attention layers.
    """
    why = why_untrimmed_here(config, target_names)
    return why if agreed_by_all(why is None) else why or "it does not hold on another rank"


def why_untrimmed_here(config: VllmConfig, target_names: Collection[str]) -> str | None:
    """The same for the layers of this process, whatever other ranks have."""
    options = Mode.of(config)
    if not options.is_planned:
        return "draft lengths are fixed"
    if not options.may_trim:
        return "enable_adaptive_verification is false"
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    target = {name: layer for name, layer in layers.items() if name in target_names}
    drafter = {name: layer for name, layer in layers.items() if name not in target_names}
    return obstacle(config, target, drafter, 1 + options.draft_width)


def obstacle(config: VllmConfig, target: Layers, drafter: Layers, max_query_len: int) -> str | None:
    """Why vLLM's adaptive verification does not hold here; None where it does.

    vLLM would stop with an error for each of these, naming an option that nobody has written.

    Args:
        config: as the engine was started with.
        target: attention layers of the target by name, with their backends.
        drafter: those of the drafter.
        max_query_len: rows of a request that is verified, 1 + K.
    """
    if not config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "full CUDA graphs are off"
    for owner, setting in (
        (config.aux_output_config, "enable_return_routed_experts"),
        (config.model_config, "return_sampling_mask"),
        (config.parallel_config, "enable_batch_sharded_sampling"),
    ):
        if getattr(owner, setting, False):
            return f"{setting} is on"
    for layer in target.values():
        if layer.get_attn_backend().is_ssm():
            return f"{layer.get_attn_backend().get_name()} keeps a state instead of a cache"
    groups = [list(groups_of(config, target)), list(groups_of(config, drafter))]
    with _turned_on(config.speculative_config):  # backends look at it
        backend = get_query_lens_mismatch_unsupported_backend(groups[:1])
        if backend is not None:
            return f"{backend} must know each request's rows on the host"
        ragged = get_varlen_cudagraph_unsupported_backend(groups[:1], config, max_query_len)
        if ragged is not None:
            return f"{ragged[0]} has no CUDA graphs for ragged batches"
        # vLLM asks the target alone, and then captures what all layers can do.
        support = get_attn_cg_support(groups, config)
    if support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
        return f"{support.min_cg_attn_backend} has no full CUDA graphs for batches of drafts"
    return None


def groups_of(config: VllmConfig, layers: Layers) -> Iterator[AttentionGroup]:
    """A group for each layer, with the class of its metadata builder, which is what is asked."""
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        if spec is None:  # it shares another layer's cache
            continue
        backend = layer.get_attn_backend()
        builder: Any = backend.get_builder_cls()
        yield AttentionGroup(backend, [name], spec, 0, metadata_builders=[builder])


@contextmanager
def _turned_on(speculative: SpeculativeConfig | None) -> Iterator[None]:
    assert speculative is not None
    before = speculative.enable_adaptive_verification
    speculative.enable_adaptive_verification = True
    try:
        yield
    finally:
        speculative.enable_adaptive_verification = before


def lengths_to_choose(runner: GPUModelRunner) -> list[int]:
    """Draft lengths that the scheduler may give all requests of a step, from 0 to K; ascending.

    Once graphs are captured.
    """
    max_draft = runner.num_speculative_steps
    if runner.adaptive_verification is not None:
        return [0, max_draft]  # the device trims what is not worth it
    manager = runner.cudagraph_manager
    captured = {graph.uniform_token_count for graph in manager.graphs} if manager else set()
    lengths = {count - 1 for count in captured if count}
    return sorted(lengths | {0, max_draft}) if lengths else list(range(max_draft + 1))
