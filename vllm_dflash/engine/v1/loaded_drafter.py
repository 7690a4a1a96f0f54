"""vLLM's V1 proposer with our drafter in it: its start-up, and nothing of a step."""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.dflash import DFlashProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.mode import Mode
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.v1.block_forward import BlockForward
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.model.draft_model import DFlashDraftModel


class LoadedDrafter(DFlashProposer):
    """Loads the drafter and finds its cache.

    Nothing of vLLM's class is used but its buffers and its start-up; the runner knows its drafter
    by that class.
    """

    model: DFlashDraftModel
    runner: GPUModelRunner

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.options = Mode.of(vllm_config)
        self.spec = self.options.drafter
        self.width = self.options.draft_width
        """Drafts of a block at most; there may be more of free ones."""
        self.feature_width = len(self.spec.taps) * self.spec.target_hidden_size
        self.runs_target_alone = False
        """Whether dummy runs of the runner are to leave the drafter out."""

    @property
    def length_limit(self) -> int:
        """Tokens a request may come to and be drafted. vLLM may lower its limit after start-up."""
        return min(self.max_model_len, drafted_length(self.draft_model_config))

    def _create_draft_vllm_config(self) -> VllmConfig:
        base = super()._create_draft_vllm_config()
        attention = replace(base.attention_config, use_non_causal=not all(self.spec.causal))
        return replace(base, attention_config=attention)

    def _maybe_share_embeddings(self, target_language_model: nn.Module) -> None:
        self.model.share_vocabulary(target_language_model)

    def _maybe_share_lm_head(self, target_language_model: nn.Module) -> None:
        """The head came with the embedding."""

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter."""
        super().load_model(target_model)
        cover_positions(self.model, self.max_model_len)
        self.block = BlockForward(self.model, self.vllm_config, [])

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Find the drafter's cache group, and build metadata for each kind of layer in it."""
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        groups = split_by_kind(
            self.draft_attn_groups[0],
            self.model.context.attentions,
            self.vllm_config,
            self.device,
            kernel_block_sizes[self.kv_cache_gid] if kernel_block_sizes else None,
        )
        self.block = BlockForward(self.model, self.vllm_config, groups)
        group = kv_cache_config.kv_cache_groups[self.kv_cache_gid]
        self.num_slots = kv_cache_config.num_blocks * group.kv_cache_spec.block_size
        self.num_cache_groups = len(kv_cache_config.kv_cache_groups)

    @torch.inference_mode()
    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Profile and compile: the largest context and the largest block, writing nothing."""
        if self.runs_target_alone:
            return
        features = torch.zeros(num_tokens, self.feature_width, dtype=self.dtype, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        self.model.context.project(self.model.context.fuse(features), positions)
        num_queries = min(num_tokens, self.max_batch_size * (1 + self.width))
        hidden = self.block.run(None, {}, self.input_ids[:num_queries], positions[:num_queries])
        if self.model.selector is None:
            self.model.compute_logits(hidden)
        else:
            self.model.compute_candidates(hidden)
