"""The DFlash draft model that vLLM loads as architecture `DFlashDraftModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dflash.checkpoint.tensors import check_tensors
from vllm_dflash.drafter.context import ContextProjection
from vllm_dflash.drafter.layers import DraftBlock
from vllm_dflash.options import DFlashOptions


class DFlashDraftModel(nn.Module):
    """A drafter that shares its target's embedding and head (arXiv 2602.06036).

    Used in three steps: `share_vocabulary` once, `context.store` for every scheduled token of
    every step, and `forward` then `compute_logits` for the blocks that are drafted.
    """

    checkpoint_names = WeightsMapper(
        orig_to_new_prefix={
            "fc.": "context.fc.",
            "hidden_norm.": "context.hidden_norm.",
            "layers.": "block.layers.",
            "norm.": "block.norm.",
        },
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        },
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.spec = DFlashOptions.of(vllm_config).drafter
        prefix = prefix or "dflash"
        self.context = ContextProjection(self.spec, prefix=f"{prefix}.context")
        self.block = DraftBlock(
            vllm_config=vllm_config,
            spec=self.spec,
            first_layer=vllm_config.model_config.get_total_num_hidden_layers(),
            prefix=prefix,
        )

    def share_vocabulary(self, target: Any) -> None:
        """Use the target's own embedding and head functions.

        Going through its functions, not its weights, applies whatever it does to them (Gemma's
        embedding scale, a logit softcap, tensor-parallel gathering) exactly once and rounded
        exactly as it rounds.
        """
        self._embed: Callable[[torch.Tensor], torch.Tensor] = target.embed_input_ids
        self._head: Callable[[torch.Tensor], torch.Tensor] = target.compute_logits

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of [Q] token ids: [Q, H]."""
        return self._embed(input_ids)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Blocks of any number of requests, [Q] ids and positions, to hidden states [Q, H]."""
        return self.block(self.embed_input_ids(input_ids), positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's logits [Q, V] of hidden states [Q, H]."""
        return self._head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a z-lab checkpoint, all or nothing.

        Raises:
            DrafterError: tensors are missing, surplus or misshapen; each is named.
        """
        # All of them at once: a misfit must be named before vLLM's loaders trip over it.
        tensors = list(weights)
        check_tensors(self.spec, {name: tuple(tensor.shape) for name, tensor in tensors})
        loaded = AutoWeightsLoader(self).load_weights(tensors, mapper=self.checkpoint_names)
        self.context.fuse_layers(self.block.attentions())
        return loaded
