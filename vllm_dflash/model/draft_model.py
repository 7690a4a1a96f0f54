"""The DFlash draft model that vLLM loads as architecture `DFlashDraftModel`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    get_draft_quant_config,
)
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from vllm_dflash.checkpoint.headers import INDEX, Tensor, loading_pattern
from vllm_dflash.checkpoint.tensors import (
    LATTICE,
    MASK_EMBEDDING_FILE,
    called_here,
    check_tensors,
    parse_mask_embedding,
)
from vllm_dflash.config.mode import Mode
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.model.dflash2_layers import CandidateSelector
from vllm_dflash.model.layers import DraftBlock
from vllm_dflash.model.lilicorr_head import finish_head, load_head, make_head
from vllm_dflash.model.vocabulary import DraftVocabulary, check_ids

if TYPE_CHECKING:
    from vllm.model_executor.models.lilicorr import LiLiCorrHead

FUSED_LAYERS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""What of a checkpoint is one layer here, for methods of quantisation that name layers."""


class DFlashDraftModel(nn.Module):
    """A drafter, which shares its target's embedding and head or has its own (arXiv 2602.06036).

    Used in three steps: `share_vocabulary` once, `context.store` for every token that was not
    rejected, and `forward` then `compute_logits` for the blocks that are drafted.
    """

    allow_patterns_overrides: Sequence[str] = ("*.safetensors",)
    """vLLM's loader takes these files and no others: no pickle, whatever `load_format` says. Each
    drafter narrows it to what its index names."""

    checkpoint_names = WeightsMapper(
        orig_to_new_prefix={
            "fc.": "context.fc.",
            "hidden_norm.": "context.hidden_norm.",
            "layers.": "block.layers.",
            "candidate_selector.": "selector.",
            "norm.": "block.norm.",
            "embed_tokens.": "vocabulary.embed_tokens.",
            "lm_head.": "vocabulary.lm_head.",
            "d2t": "vocabulary.d2t",
            "t2d": None,  # which ids of the target it has; the way back is all that is needed
            "thresh_head_": None,  # AdaFlash's; surplus where the config does not say so
            "prob_head.": None,
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
        mode = Mode.of(vllm_config)
        self.spec = mode.drafter
        quantisation = get_draft_quant_config(vllm_config)
        if quantisation is not None:
            quantisation.packed_modules_mapping = FUSED_LAYERS
        self.context = ContextProjection(self.spec, quantisation)
        self.block = DraftBlock(
            vllm_config=vllm_config, quantisation=quantisation, prefix=prefix or "dflash"
        )
        self.selector: CandidateSelector | None = None
        self.lattice: LiLiCorrHead | None = None
        if self.spec.lilicorr is not None:
            self.lattice = make_head(self.spec, quantisation)
        elif self.spec.dflash2 is not None:
            self.selector = CandidateSelector(
                self.spec.vocab_size, self.spec.hidden_size, self.spec.dflash2
            )
        self.uniform_width = 1 + mode.draft_width
        """Rows of each block where nobody says what belongs to which."""
        self._target_vocab_size = vllm_config.model_config.get_vocab_size()
        self._searches_by_rank = vllm_config.speculative_config.use_local_argmax_reduction
        draft = vllm_config.speculative_config.draft_model_config
        self._files = draft.model, draft.revision
        """Where they are, but for weights: of a drafter in object storage, vLLM keeps a folder."""
        index = get_hf_file_bytes(INDEX, *self._files)
        self.allow_patterns_overrides = [loading_pattern(self.spec.model, index)]
        if vllm_config.load_config.load_format == "dummy":  # then nobody calls `load_weights`
            for parameter in self.parameters():
                parameter.data.zero_()  # what is fused stays finite
            self.vocabulary = DraftVocabulary(self.spec, (), None)
            self.context.fuse_layers(self.block.attentions())
            if self.lattice is not None:
                finish_head(self.lattice)

    @property
    def has_candidates(self) -> bool:
        """Whether tokens are chosen one after the other, along candidates of each place."""
        return self.spec.num_candidates is not None

    def share_vocabulary(self, target: Any) -> None:
        """Use the target's embedding and head where the checkpoint has none of its own.

        Raises:
            ValueError: they cannot be used so, or ranks cannot search that head part by part, as
                they were asked to.
        """
        self.vocabulary.share(target)
        if self._searches_by_rank and self.vocabulary.head_parts is None:
            raise ValueError(
                "remove 'use_local_argmax_reduction' from the speculative config: the head of"
                f" {type(target).__name__} is not one whose parts vLLM can search rank by rank."
            )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of [Q] token ids: [Q, H]."""
        return self.vocabulary.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Blocks of any number of requests, [Q] ids and positions, to hidden states [Q, H].

        `offsets`: of the rows in their own blocks, [Q]; without them, all blocks are of full width.
        """
        assert inputs_embeds is None  # in the signature because vLLM's runners name it
        if self.spec.convolutions is None:
            return self.block(self.embed_input_ids(input_ids), positions)
        if offsets is None:
            offsets = torch.arange(len(input_ids), device=input_ids.device) % self.uniform_width
        return self.block(self.embed_input_ids(input_ids), positions, offsets)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [Q, V'] of hidden states [Q, H]; `target_ids` makes tokens of their columns."""
        return self.vocabulary.logits(hidden_states)

    def compute_candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the likeliest tokens of [Q, H] and their logits, of LiLiCorr log-probabilities:
        [Q, C] each."""
        return self.vocabulary.candidates(hidden_states)

    def score_candidates(
        self,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Scores of each place's candidates behind each of the place before, [D, w, C before, C].

        Args:
            candidates: token ids of w places in D blocks, [D, w, C].
            logits: what `compute_candidates` gave, [D, w, C].
            hidden: of the rows, [D, w, H].
            bonus: each block's first token, [D]; DFlash 2 goes by it.
            newest: fused context of the token before that, [D, H]; LiLiCorr goes by it.
        """
        if self.selector is not None:
            return self.selector(candidates, logits, hidden, bonus)
        assert self.lattice is not None
        assert newest is not None
        embeddings = self.vocabulary.embed_candidates(candidates)
        is_there = newest.new_ones(len(newest), dtype=torch.bool)
        return self.lattice(embeddings, logits, hidden, newest, is_there)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Columns of logits to token ids of the target."""
        return self.vocabulary.target_ids(draft_ids)

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's ids [Q] of the likeliest tokens of [Q, H], each rank searching its part."""
        return self.target_ids(self.vocabulary.best_ids(hidden_states))

    # --- what Model Runner V2 calls -----------------------------------------------------------

    def combine_hidden_states(self, features: torch.Tensor) -> torch.Tensor:
        """Taps concatenated in ascending layer order [T, m * H_target] to fused rows [T, H]."""
        return self.context.fuse(features)

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """Names of the layers, in the order in which their slots are handed over."""
        return [attention.attn.layer_name for attention in self.context.attentions]

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Store fused rows [C, H] at each layer's slots [C]; without slots, compute only."""
        if context_slot_mapping is None:
            self.context.project(context_states, context_positions)
        else:
            self.context.store_fused(context_states, context_positions, context_slot_mapping)

    # --- loading ------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, all or nothing.

        Raises:
            DrafterError: tensors are missing, surplus, misshapen or integers, each is named; or
                it embeds fewer tokens than its target, or drafts tokens that its target lacks.
        """
        # All of them at once: a misfit must be named before vLLM's loaders trip over it.
        tensors = [(called_here(name), tensor) for name, tensor in weights]
        check_tensors(
            self.spec,
            {
                name: Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in tensors
            },
        )
        check_ids(self.spec, dict(tensors), self._target_vocab_size)
        device = self.context.hidden_norm.weight.device
        mask_embedding: torch.Tensor | None = None
        content = get_hf_file_bytes(MASK_EMBEDDING_FILE, *self._files)
        if content is not None:
            mask_embedding = parse_mask_embedding(self.spec, content).to(device)
        with device:
            names = {name for name, _ in tensors}
            self.vocabulary = DraftVocabulary(self.spec, names, mask_embedding)
        others = [one for one in tensors if not one[0].startswith(LATTICE)]
        loaded = AutoWeightsLoader(self).load_weights(others, mapper=self.checkpoint_names)
        if self.lattice is not None:
            loaded |= {f"lattice.{name}" for name in load_head(self.lattice, tensors)}
        self.context.fuse_layers(self.block.attentions())
        return loaded
