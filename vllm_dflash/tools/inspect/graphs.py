"""Which CUDA graphs an engine captures when it starts, and what memory goes with them.

Nothing is loaded and nothing captured. The list of graphs is made by vLLM's own code, from the
engine's config and from layers that only say which backend and cache they have; whether drafts are
trimmed is decided by ours, as in a worker. Buffers are those of our speculator, built on a device
without memory. Import it on CUDA only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import torch
from vllm import envs
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import get_attn_cg_support
from vllm.v1.worker.gpu.cudagraph_utils import (
    CudaGraphManager,
    _extrapolate_full_graph_memory,
    get_pp_group,
)
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import resolve_adaptive_cudagraph_mode

from vllm_dflash.checkpoint.spec import DrafterSpec
from vllm_dflash.engine.v2.drafter_config import drafter_layers
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.texts_on_device import text_bytes
from vllm_dflash.engine.v2.trimming import groups_of, why_untrimmed_here
from vllm_dflash.seams import V2_GRAPHS, check_seams
from vllm_dflash.tools.inspect.cache_layers import CacheLayer, target_layers
from vllm_dflash.tools.inspect.cache_plan import attention_backend, cache_spec
from vllm_dflash.tools.inspect.inspection import GraphFacts, GraphSet

NOWHERE = torch.device("meta")


class _Layer(AttentionLayerBase):
    """Stands for a layer that nobody has built, and answers what is asked to make graphs."""

    def __init__(self, backend: type[AttentionBackend], spec: KVCacheSpec) -> None:
        self._backend, self._spec = backend, spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return self._spec


def graph_facts(config: VllmConfig, spec: DrafterSpec) -> GraphFacts:
    """What an engine of this config captures. Its ranks may be one: only sizes of batches count.

    Raises:
        ValueError: it cannot be told, or such an engine would not start.
        RuntimeError: this vLLM has other functions, or did not load our plugin.
    """
    check_seams(V2_GRAPHS)
    if not config.use_v2_model_runner:
        raise ValueError("this configuration gets vLLM's V1 runner, and DFlash would not start")
    speculator = PlannedSpeculator(config, NOWHERE, None)
    # Heads are not divided among ranks: backends ask how many there are to each other.
    target = _layers("target", config, target_layers(config, 1))
    shape = CacheLayer(spec.num_kv_heads, spec.head_dim)
    windows = [replace(shape, window=window) for window in spec.windows]
    drafting = drafter_layers(config, speculator.requires_non_causal)
    drafter = _layers("drafter", drafting, windows, sinks=spec.attention_sinks)
    layers = {**target, **drafter}
    config.compilation_config.static_forward_context.update(layers)
    untrimmed = why_untrimmed_here(config, target)
    speculator.speculative_config.enable_adaptive_verification = untrimmed is None
    with _without_a_pipeline():
        graphs = _target_graphs(config, layers, trims=untrimmed is None)
        speculator.attn_cg_support = get_attn_cg_support(
            [list(groups_of(config, drafter))], speculator.attn_vllm_config
        )
        speculator.init_cudagraph_manager(graphs.cudagraph_mode)
    blocks = speculator.query_cudagraph_manager
    assert blocks is not None
    whole = graphs._capture_descs.get(CUDAGraphMode.FULL, ())
    row = config.model_config.get_hidden_size() * config.model_config.dtype.itemsize
    buffers = sum(one.nbytes for one in speculator.persistent_buffers() if one.device == NOWHERE)
    if speculator.texts is not None:
        buffers += text_bytes(speculator.max_num_reqs, speculator.max_model_len)
    staging = getattr(speculator, "_aux_staging", None)  # from vLLM 0.33 on
    return GraphFacts(
        mode=graphs.cudagraph_mode.name,
        max_num_seqs=speculator.max_num_reqs,
        max_num_batched_tokens=speculator.max_num_tokens,
        untrimmed=untrimmed,
        captured=[*_sets("target", graphs), *_sets("drafter", blocks)],
        drafter_buffers=buffers,
        staged_taps=0 if staging is None else staging.nbytes,
        # Last hidden states and taps of the largest graph, which the others share.
        target_outputs=max((graph.num_tokens for graph in whole), default=0)
        * (1 + len(spec.taps))
        * row,
        # vLLM captures two graphs to measure them, and takes no less than its floor for each.
        least_reserved=_extrapolate_full_graph_memory([0, 0][: len(whole)], len(whole)),
    )


def _layers(
    whose: str, config: VllmConfig, layers: Sequence[CacheLayer], *, sinks: bool = False
) -> dict[str, AttentionLayerBase]:
    """By name, with the backends that vLLM takes for them."""
    found: dict[str, AttentionLayerBase] = {}
    with set_current_vllm_config(config):
        for number, layer in enumerate(layers):
            backend = attention_backend(config, layer, has_sink=sinks)
            found[f"{whose}.{number}"] = _Layer(backend, cache_spec(config, layer, backend))
    return found


def _target_graphs(
    config: VllmConfig, layers: Mapping[str, AttentionLayerBase], *, trims: bool
) -> CudaGraphManager:
    """As `GPUModelRunner.initialize_kv_cache` makes it, for a model that is compiled."""
    compilation = config.compilation_config
    support = get_attn_cg_support([list(groups_of(config, layers))], config)
    is_compiled = compilation.mode == CompilationMode.VLLM_COMPILE
    in_pieces = is_compiled or envs.VLLM_USE_BREAKABLE_CUDAGRAPH
    if trims:
        compilation.cudagraph_mode = resolve_adaptive_cudagraph_mode(
            compilation.cudagraph_mode, piecewise_capture_available=in_pieces
        )
    rows = 1 + config.num_speculative_tokens
    mode = compilation.resolve_cudagraph_mode_and_sizes(
        support.min_cg_support,
        support.min_cg_attn_backend,
        rows,
        use_v2_model_runner=True,
        piecewise_capture_available=in_pieces,
    )
    return CudaGraphManager(config, NOWHERE, mode, rows, varlen_decode=trims)


def _sets(model: str, graphs: CudaGraphManager) -> Iterator[GraphSet]:
    """Graphs of a kind together, in the order vLLM looks for one."""
    sizes: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    for graph in chain(*graphs._capture_descs.values()):
        if graph.uniform_token_count is not None and graph.num_reqs is not None:
            sizes["uniform", graph.uniform_token_count].add(graph.num_reqs)
        elif graph.cg_mode == CUDAGraphMode.PIECEWISE:
            sizes["pieces", None].add(graph.num_tokens)
        else:
            kind = "any" if graph.max_query_len is None else "ragged"
            sizes[kind, graph.max_query_len].add(graph.num_tokens)
    for (kind, rows), found in sizes.items():
        yield GraphSet(model, kind, rows, sorted(found))


@contextmanager
def _without_a_pipeline() -> Iterator[None]:
    """vLLM's list of graphs asks for this process's place in a pipeline, and there is none."""
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    cudagraph_utils.get_pp_group = lambda: alone
    try:
        yield
    finally:
        cudagraph_utils.get_pp_group = get_pp_group
