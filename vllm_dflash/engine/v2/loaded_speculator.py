"""Start-up of vLLM's V2 speculator with our drafter; steps are in `speculator.py`."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import CUDAGraphMode, VllmConfig, replace
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.attention_groups import split_by_kind, split_by_window
from vllm_dflash.engine.scheduler_output import room_for_blocks
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.model.draft_model import DFlashDraftModel

MOST_TIMES_TARGET = 4
"""Maximum rows of the drafter's largest graph, as a multiple of the target's. The graph keeps the
memory of its logits: 0.6 GB at 2,048 rows and a vocabulary of 152,000."""


def block_capture_sizes(sizes: list[int], block_rows: int, most_requests: int) -> list[int]:
    """Row counts of the drafter's graphs: the target's sizes, then a quarter more requests each.

    `block_rows`: rows per request; `most_requests`: that a step drafts for.
    """
    requests = max(sizes) // block_rows
    more, most = [], min(most_requests, MOST_TIMES_TARGET * max(sizes) // block_rows)
    while requests < most:
        requests = min(requests + max(requests // 4, 1), most)
        more.append(requests * block_rows)
    return [*sizes, *more]


class DFlashSpeculatorBase(DFlashSpeculator):
    """Loads the drafter, gives its layers their metadata, and captures its graphs."""

    model: DFlashDraftModel
    vllm_config: VllmConfig
    runs_block = True
    """Whether the step that runs, or is captured, drafts a block. Without one it stores context."""
    block_graphs: DFlashCudaGraphManager | None = None
    context_graphs: DFlashCudaGraphManager | None = None
    """Graphs of steps without a block."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.options = EngineOptions.from_config(vllm_config)
        super().__init__(room_for_blocks(vllm_config), device)
        self.engine_config = vllm_config
        """The config that the engine was started with; vLLM's class changes its own copy."""
        self.spec = self.options.drafter
        self.sample_from_anchor = self.spec.sample_from_anchor
        self.num_query_per_req = self.options.block_rows
        self.parallel_drafting_token_id = self.spec.mask_token_id
        self.requires_non_causal = not all(self.spec.causal)
        self.use_acceptance_estimator = False  # we compute the chances
        self._aux_staging = None  # vLLM 0.33: the target's graph has fused the taps already
        self.runs_target_alone = False
        """Whether the runner's dummy runs skip the drafter."""
        self.newest_context: torch.Tensor | None = None
        """Fused context of each request's last stored token, [max R, H]; only for LiLiCorr."""
        if self.spec.lilicorr is not None:
            self.newest_context = torch.zeros(
                self.max_num_reqs, self.spec.hidden_size, dtype=self.dtype, device=device
            )
            # vLLM 0.33 copies the counts here for its captured graph.
            self._num_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)

    @property
    def query_cudagraph_manager(self) -> DFlashCudaGraphManager | None:
        """Graphs of vLLM's name: those of the step that runs."""
        return self.block_graphs if self.runs_block else self.context_graphs

    @query_cudagraph_manager.setter
    def query_cudagraph_manager(self, graphs: DFlashCudaGraphManager | None) -> None:
        self.block_graphs = graphs

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows that a graph stores. Steps without a block seldom verify drafts; the rows of
        those that do are stored before."""
        rows = 1 + self.options.num_speculative_tokens if self.runs_block else 1
        return min(num_reqs * rows, self.max_num_tokens)

    def fused_taps(self, taps: list[torch.Tensor]) -> torch.Tensor:
        """Context rows [T, H] that the target has fused within its graph, or else of its taps."""
        if self._has_fused_taps:
            return taps[0]
        return self.model.combine_hidden_states(torch.cat(taps, dim=-1))

    def _fuse_taps_in(self, target: nn.Module) -> None:
        """Let the target's forward end with fusing its taps (hook "fused taps"): its graphs do it.

        A compiled class runs no hooks. vLLM compiles a part of the models that it serves, and the
        hook is on the full model.
        """

        def fused(_: nn.Module, __: Any, output: tuple[torch.Tensor, list[torch.Tensor]]) -> Any:
            hidden_states, taps = output
            return hidden_states, [self.model.combine_hidden_states(torch.cat(taps, dim=-1))]

        self._has_fused_taps = type(target).__call__ is nn.Module.__call__
        if self._has_fused_taps:
            target.register_forward_hook(fused)

    def skips_dummy_run(self, num_requests: int) -> bool:
        """Whether a dummy run leaves out the drafter. It may have more requests than vLLM's
        scheduler lets into a step, and no room for their blocks."""
        rows = num_requests * self.num_query_per_req
        return self.runs_target_alone or rows > self.max_num_tokens

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> DFlashDraftModel:
        """Load our draft model, let it use the target's vocabulary, and let the target fuse its
        taps."""
        with set_model_tag("dflash_head"):
            model = get_model(
                vllm_config=self._config_of_layers(), model_config=self.draft_model_config
            )
        language_model = getattr(target_model, "get_language_model", lambda: target_model)()
        if not hasattr(language_model, "compute_logits"):  # it is only the layers
            language_model = target_model
        model.share_vocabulary(language_model)
        cover_positions(model, self.max_model_len)
        self._fuse_taps_in(target_model)
        return model

    def prepare_context_anchor(self, *where: Any) -> None:
        """Copy the fused rows that LiLiCorr reads to `newest_context`; captured by vLLM 0.33."""
        if self.newest_context is None:
            return
        *batch, num_rejected = where
        if len(batch) == 1:  # vLLM 0.32
            batch = [batch[0].num_reqs, batch[0].query_start_loc]
        count, starts = batch
        rows = starts[1 : count + 1] - num_rejected[:count] - 1
        torch.index_select(
            self.hidden_states, 0, rows.clamp(min=0), out=self.newest_context[:count]
        )

    def _config_of_layers(self) -> VllmConfig:
        """Config to build the drafter's layers with: they have their own attention backend, cache
        dtype and load config."""
        config, speculative = self.vllm_config, self.speculative_config
        cache = config.cache_config
        if speculative.kv_cache_dtype is not None:
            cache = replace(cache, cache_dtype=speculative.kv_cache_dtype)
        attention = replace(
            config.attention_config,
            use_non_causal=self.requires_non_causal,
            backend=speculative.attention_backend,
        )
        return replace(
            config,
            attention_config=attention,
            cache_config=cache,
            load_config=get_draft_load_config(config),
        )

    @property
    def attn_vllm_config(self) -> VllmConfig:
        """Config to build the drafter's metadata with, whose buffers fit the largest graph."""
        return self._with_larger_graphs(super().attn_vllm_config)

    def _with_larger_graphs(self, config: VllmConfig) -> VllmConfig:
        """Copy of a config for the drafter's graphs. A step drafts more rows than it verifies, so
        the blocks of many requests would exceed the target's largest graph."""
        config = copy(config)
        graphs = config.compilation_config = copy(config.compilation_config)
        if sizes := graphs.cudagraph_capture_sizes:
            rows, most = self.num_query_per_req, self.max_num_tokens
            sizes = block_capture_sizes(sizes, rows, min(self.max_num_reqs, most // rows))
            graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, max(sizes)
        return config

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan graphs of blocks of one width, since the table of draft lengths is for the target's
        graphs, and as many of steps without a block."""
        config, self.vllm_config = self.vllm_config, self._with_larger_graphs(self.vllm_config)
        self.vllm_config.speculative_config = copy(self.speculative_config)
        self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
        try:
            super().init_cudagraph_manager(cudagraph_mode)
            assert self.block_graphs is not None
            self.context_graphs = DFlashCudaGraphManager(
                self.vllm_config,
                self.device,
                self.block_graphs.cudagraph_mode,
                decode_query_len=self.num_query_per_req,
            )
        finally:
            self.vllm_config = config

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Give each kind of layer its own metadata."""
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        attentions = self.model.context.attentions
        for groups in target_attn_groups or ():
            split_by_window(groups, attentions, self.engine_config, self.device)
        for groups in self.attn_groups:
            found, groups[:] = list(groups), []
            for group in found:
                block_size = group.get_metadata_builder().kv_cache_spec.block_size
                groups += split_by_kind(
                    group, attentions, self.attn_vllm_config, self.device, block_size
                )
        self._configure_decode_metadata_update()

    def capture(self) -> None:
        """Capture graphs of steps without a block, and of blocks."""
        for self.runs_block in (False, True):
            super().capture()

    def _prepare_graph_forward(self, num_reqs: int, attn_metadata: dict[str, Any] | None) -> None:
        """What a graph does first: without a block, no attention needs its metadata updated."""
        super()._prepare_graph_forward(num_reqs, attn_metadata if self.runs_block else None)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """Metadata of blocks that run eagerly, or whose graph does not update it."""
        return super()._build_uniform_attn_metadata(*args, **kwargs) if self.runs_block else None
