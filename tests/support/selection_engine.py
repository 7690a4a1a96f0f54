"""An engine's start on a faked CUDA platform, as far as it goes without a GPU.

Import it in a process that has called `fake_cuda`, before a compute capability is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import (
    CompilationMode,
    CUDAGraphMode,
    VllmConfig,
    get_layers_from_vllm_config,
    replace,
    set_current_vllm_config,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.utils import flashinfer
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flashinfer as flashinfer_backend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.worker_base import WorkerBase

from support.selection_config import (
    FULL,
    HEADS,
    LAYERS,
    LINEAR,
    MAX_REQUESTS,
    SLIDING,
    WINDOW,
    create_config,
)
from support.selection_table import ADAPTIVE, ANY, FEW, REFUSED, Cell, Row
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine import agreement
from vllm_dflash.engine.v2 import loaded_speculator, speculator
from vllm_dflash.engine.v2.v2_profile import lengths_to_choose
from vllm_dflash.model.layers import DraftAttentionCache

try:
    # vLLM 0.33
    from vllm.v1.core.kv_cache_planning import (  # type: ignore[import-not-found]
        get_kv_cache_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

CPU = torch.device("cpu")
"""Device of the buffers of what is built."""


class Engine:
    """The parts that a worker builds, down to the list of graphs that it would capture."""

    def __init__(self, config: VllmConfig, kind: str) -> None:
        self.config = config
        runner: Any = SimpleNamespace(
            device=CPU, req_states=request_states(), output_copy_stream=None
        )
        self.speculator = speculator.PlannedSpeculator(config, runner)
        self.max_draft = self.speculator.num_speculative_steps
        with set_current_vllm_config(config), _default_dtype(torch.bfloat16):
            build_target(config, kind)
            self.targets = set(self.layers)
            self.speculator.load_model(nn.Module())
        current_platform.update_block_size_for_backend(config)
        with set_current_vllm_config(config):
            specs = {name: layer.get_kv_cache_spec(config) for name, layer in self.layers.items()}
            layouts = WorkerBase.get_supported_kv_cache_layouts(SimpleNamespace(vllm_config=config))
            resolve_kv_cache_layout(config, [layouts], specs.values())
            self.cache = KVCacheConfig(1000, [], get_kv_cache_groups(config, specs))

    @property
    def layers(self) -> dict[str, Any]:
        return get_layers_from_vllm_config(self.config, AttentionLayerBase)

    def initialize(self) -> Any:
        """Return the runner as vLLM's `GPUModelRunner.initialize_kv_cache` leaves it."""
        config, compilation = self.config, self.config.compilation_config
        draft_names = self.speculator.draft_attn_layer_names
        self.groups, support, _ = init_attn_backend(
            self.cache, config, CPU, draft_layer_names=draft_names
        )
        verification = adaptive.maybe_create_adaptive_verification_manager(
            enable_adaptive_verification=self.speculator.enable_adaptive_verification,
            attn_groups=self.groups,
            req_states=SimpleNamespace(num_speculative_steps=self.max_draft),
            query_start_loc=torch.zeros(1),
            num_bonus_tokens=1,
            max_total_logits=1,
            vllm_config=config,
            target_layer_names=self.targets,
            additional_attn_cg_support=(AttentionCGSupport.ALWAYS, None),
        )
        # If anything is compiled, our class and the targets' are all compiled.
        is_compiled = compilation.mode == CompilationMode.VLLM_COMPILE
        if verification is not None:
            compilation.cudagraph_mode = adaptive.resolve_adaptive_cudagraph_mode(
                compilation.cudagraph_mode, piecewise_capture_available=is_compiled
            )
        mode = compilation.resolve_cudagraph_mode_and_sizes(
            support.min_cg_support,
            support.min_cg_attn_backend,
            1 + self.max_draft,
            use_v2_model_runner=True,
            kv_cache_config=self.cache,
            max_num_reqs=MAX_REQUESTS,
            is_profiling=False,
            piecewise_capture_available=is_compiled,
        )
        graphs = cudagraph_utils.ModelCudaGraphManager(
            config, CPU, mode, 1 + self.max_draft, varlen_decode=verification is not None
        )
        graphs.graphs = dict.fromkeys(graphs._capture_descs.get(CUDAGraphMode.FULL, ()))
        graphs._graphs_captured = True
        return SimpleNamespace(
            num_speculative_steps=self.max_draft,
            adaptive_verification=verification,
            cudagraph_manager=graphs,
        )

    def draft_widths(self, mode: CUDAGraphMode) -> list[int]:
        """Return the rows of a request in the drafter's graphs: those that draft a block, and those
        of steps without one."""
        # Ours also makes a builder for each kind of layer, which needs a device.
        DraftModelSpeculator.set_attn(self.speculator, None, self.cache, None, None, self.groups)
        self.speculator.init_cudagraph_manager(mode)
        both: Any = (self.speculator.block_graphs, self.speculator.context_graphs)
        found, of_context = (graphs._capture_descs.get(CUDAGraphMode.FULL, ()) for graphs in both)
        assert found == of_context
        return sorted({desc.uniform_token_count for desc in found})


def request_states() -> Any:
    """Return what a runner knows of its requests, as far as a speculator refers to it."""
    empty = SimpleNamespace(gpu=torch.zeros(0, dtype=torch.int32))
    return SimpleNamespace(
        all_token_ids=empty,
        total_len=empty,
        last_sampled_tokens=torch.zeros(0, 1, dtype=torch.int64),
    )


def build_target(config: VllmConfig, kind: str) -> None:
    """Build the attention layers of a target, which choose their backends."""

    class GatedDeltaNet(MambaBase):
        """Replaces vLLM's, which has weights and kernels."""

        mamba_type = MambaAttentionBackendEnum.GDN_ATTN

        def __init__(self, prefix: str) -> None:
            config.compilation_config.static_forward_context[prefix] = self

        def get_state_shape(self) -> Any:
            return model_class.get_mamba_state_shape_from_config(config)

        def get_state_dtype(self) -> Any:
            return model_class.get_mamba_state_dtype_from_config(config)

    model = config.model_config
    model_class, _ = model.registry.resolve_model_cls(model.architectures, model_config=model)
    heads, kv_heads, size = HEADS.values()
    for number, layer in enumerate(LAYERS[kind]):
        if layer == LINEAR:
            GatedDeltaNet(f"model.layers.{number}.linear_attn")
            continue
        Attention(
            heads,
            size,
            size**-0.5,
            num_kv_heads=kv_heads,
            cache_config=replace(config.cache_config, sliding_window=None),
            per_layer_sliding_window=WINDOW if layer == SLIDING else None,
            prefix=f"model.layers.{number}.self_attn.attn",
        )


def build_drafter(*, vllm_config: VllmConfig, model_config: Any) -> Any:
    """Build the attention layers of the drafter as `BlockAttention` does, and nothing else."""
    spec = EngineOptions.from_config(vllm_config).drafter
    first = vllm_config.model_config.get_total_num_hidden_layers()
    with set_current_vllm_config(vllm_config):
        for number, window in enumerate(spec.windows):
            DraftAttentionCache(
                spec.num_heads,
                spec.head_dim,
                spec.head_dim**-0.5,
                num_kv_heads=spec.num_kv_heads,
                cache_config=replace(vllm_config.cache_config, sliding_window=None),
                per_layer_sliding_window=window,
                sinks=None,
                prefix=f"dflash.layers.{first + number}.self_attn.attn",
            )
    return SimpleNamespace(share_vocabulary=lambda target: None, modules=lambda: ())


def stand_in_for_a_device() -> None:
    """Replace everything that needs a device or another process."""

    def create_builders(group: Any, *args: Any, **kwargs: Any) -> None:
        kind = group.backend.get_builder_cls()
        builder = SimpleNamespace(
            get_cudagraph_support=kind.get_cudagraph_support,
            get_varlen_cudagraph_max_query_len=kind.get_varlen_cudagraph_max_query_len,
            supports_draft_decode_metadata_update=False,
        )
        group.metadata_builders = [builder]

    utils.AttentionGroup.create_metadata_builders = create_builders
    adaptive.AdaptiveVerificationManager = lambda *args, **kwargs: object()
    alone = SimpleNamespace(world_size=1, is_first_rank=True, is_last_rank=True)
    cudagraph_utils.get_pp_group = lambda: alone
    setattr(agreement, "get_tp_group", lambda: alone)  # noqa: B010
    setattr(loaded_speculator, "get_model", build_drafter)  # noqa: B010
    setattr(speculator, "has_room_for_texts", lambda *_: False)  # noqa: B010
    for name in ("get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"):
        setattr(flashinfer_backend, name, lambda *_: 1)
    flashinfer_backend._get_multi_ctas_kv_counter_buffer = lambda *_: None  # vLLM 0.33
    # vLLM reads what a model class can do in another process, to avoid CUDA.
    registry._run_in_subprocess = lambda read: read()


def run(folder: Path, cell: Cell) -> Row:
    """Start an engine as far as it goes, or until vLLM refuses to verify adaptively."""
    try:
        return _run(folder, cell)
    except ValueError as error:
        if not cell.is_adaptive or "Adaptive verification" not in str(error):
            raise
        return Row(cell, mechanism=REFUSED)


def _run(folder: Path, cell: Cell) -> Row:
    flashinfer.has_nvidia_artifactory = lambda: cell.has_kernels
    flashinfer.supports_trtllm_attention.cache_clear()
    config = create_config(folder, cell)
    assert config.speculative_config.enable_adaptive_verification == cell.is_adaptive
    assert config.scheduler_config.async_scheduling == cell.is_async
    engine = Engine(config, cell.target)
    with set_current_vllm_config(config):
        for _ in ("to measure memory", "to serve"):
            runner = engine.initialize()
        widths = engine.draft_widths(runner.cudagraph_manager.cudagraph_mode)
    graphs, lengths = runner.cudagraph_manager, lengths_to_choose(runner, engine.max_draft)
    if runner.adaptive_verification is not None:
        mechanism = ADAPTIVE
    else:
        mechanism = FEW if len(lengths) <= engine.max_draft else ANY
    full = [name for name in engine.targets if LAYERS[cell.target][int(name.split(".")[2])] == FULL]
    return Row(
        cell,
        mechanism=mechanism,
        selected=engine.layers[min(full)].get_attn_backend().get_name(),
        lengths=lengths,
        ungraphed=[length for length in lengths if not has_graphs(graphs, length)],
        draft_widths=widths,
    )


def has_graphs(graphs: Any, length: int) -> bool:
    """Return whether batches of this draft length get what the mode promises for drafts."""
    rows = 1 + length
    largest = graphs.compilation_config.max_cudagraph_capture_size or 0
    return all(
        graphs.dispatch(requests, requests * rows, rows, 0, max_query_len=rows).cg_mode
        == graphs.cudagraph_mode.decode_mode()
        for requests in range(1, 1 + min(MAX_REQUESTS, largest // rows))
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)
