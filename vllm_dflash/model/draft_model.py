"""The DFlash draft model that vLLM loads as architecture `DFlashDraftModel`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    get_draft_quant_config,
)
from vllm.transformers_utils.repo_utils import get_hf_file_bytes

from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.names import FUSED_LAYERS, LATTICE, by_our_names
from vllm_dflash.checkpoint.refusal import cut_off
from vllm_dflash.checkpoint.tensors import (
    MASK_EMBEDDING_FILE,
    check_tensors,
    parse_mask_embedding,
    unread_tensors,
)
from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.model.context_projection import ContextProjection
from vllm_dflash.model.dflash2_layers import make_selector
from vllm_dflash.model.layers import DraftBlock
from vllm_dflash.model.lilicorr_head import finish_head, load_head, make_head
from vllm_dflash.model.vocabulary import DraftVocabulary, check_ids

if TYPE_CHECKING:
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector


class DFlashDraftModel(nn.Module):
    """A drafter that shares its target's embedding and head or has its own (arXiv 2602.06036).

    Call `share_vocabulary` once, `context.store` for every token that was not rejected, and
    `forward`, then `compute_logits`, for the blocks to draft.
    """

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
        options = EngineOptions.from_config(vllm_config)
        self.spec = options.drafter
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
            self.selector = make_selector(
                self.spec.hidden_size, self.spec.vocab_size, self.spec.dflash2
            )
        self.uniform_width = options.block_rows
        """Rows of each block if `forward` gets no offsets."""
        self._target_vocab_size = vllm_config.model_config.get_vocab_size()
        draft = vllm_config.speculative_config.draft_model_config
        self._files = draft.model, draft.revision
        """Where the files are, except weights; for object storage, the folder that vLLM keeps."""
        # vLLM does not call `load_weights` for made-up weights.
        if get_draft_load_config(vllm_config).load_format == "dummy":
            for parameter in self.parameters():
                parameter.data.zero_()  # keeps fused weights finite
            self.vocabulary = DraftVocabulary(self.spec, (), None)
            self.context.fuse_layers(self.block.attentions())
            if self.lattice is not None:
                finish_head(self.lattice)

    @property
    def has_candidates(self) -> bool:
        """Whether tokens are chosen one after the other, among candidates for each position."""
        return self.spec.num_candidates is not None

    def share_vocabulary(self, target: Any) -> None:
        """Use the target's embedding and head if the checkpoint has none of its own.

        Raises:
            ValueError: they cannot be shared.
        """
        self.vocabulary.share(target)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [Q, H] of token ids [Q]."""
        return self.vocabulary.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [Q, H] of any number of blocks, from token ids and positions, [Q] each.

        `offsets`: index of each row in its own block, [Q]; None if all blocks have
        `uniform_width` rows.
        """
        assert inputs_embeds is None  # in the signature because vLLM's runners name it
        if self.spec.convolutions is None:
            return self.block(self.embed_input_ids(input_ids), positions)
        if offsets is None:
            offsets = torch.arange(len(input_ids), device=input_ids.device) % self.uniform_width
        return self.block(self.embed_input_ids(input_ids), positions, offsets)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits [Q, V'] of hidden states [Q, H]; `target_ids` turns columns into token ids."""
        return self.vocabulary.logits(hidden_states)

    def compute_candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of the C most probable tokens for hidden states [Q, H], and their logits (LiLiCorr:
        their log-probabilities), [Q, C] each."""
        return self.vocabulary.candidates(hidden_states)

    def score_candidates(
        self,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        bonus: torch.Tensor,
        newest: torch.Tensor | None,
    ) -> torch.Tensor:
        """Scores of each position's candidates after each one of the position before,
        [D, w, C before, C].

        Args:
            candidates: token ids for w positions in D blocks, [D, w, C].
            logits: second output of `compute_candidates`, [D, w, C].
            hidden: hidden states of the rows, [D, w, H].
            bonus: each block's first token, [D]; only DFlash 2 reads it.
            newest: fused context of the token before `bonus`, [D, H]; only LiLiCorr reads it.
        """
        if self.selector is not None:
            return self.selector(candidates, logits, hidden, bonus)
        assert self.lattice is not None
        assert newest is not None
        embeddings = self.vocabulary.embed_candidates(candidates)
        is_there = newest.new_ones(len(newest), dtype=torch.bool)
        return self.lattice(embeddings, logits, hidden, newest, is_there)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target for columns of logits."""
        return self.vocabulary.target_ids(draft_ids)

    # --- called by Model Runner V2 ------------------------------------------------------------

    def combine_hidden_states(self, features: torch.Tensor) -> torch.Tensor:
        """Fused rows [T, H] of taps concatenated in ascending layer order, [T, m * H_target]."""
        return self.context.fuse(features)

    def get_draft_kv_cache_layer_names(self) -> list[str]:
        """Names of the attention layers, in the order in which vLLM passes their slots."""
        return [attention.attn.layer_name for attention in self.context.attentions]

    def precompute_and_store_context_kv(
        self,
        context_states: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Store fused rows [C, H] at each layer's slots [C]; without slots, only compute them."""
        if context_slot_mapping is None:
            self.context.project(context_states, context_positions)
        else:
            self.context.store_fused(context_states, context_positions, context_slot_mapping)

    # --- loading ------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint, all or nothing.

        Raises:
            DrafterError: tensors are missing, surplus, of the wrong shape or integers (each is
                named), or the drafter embeds fewer tokens than its target, or drafts tokens that
                its target lacks.
        """
        # All tensors at once: a wrong one must be named before vLLM's loaders fail on it.
        named = by_our_names(self.spec.model, dict(weights))
        tensors = {name: one for name, one in named.items() if not self.spec.leaves_out(name)}
        check_tensors(
            self.spec,
            {
                name: Tensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in tensors.items()
            },
        )
        if unread := unread_tensors(self.spec, tensors):
            init_logger("vllm.dflash").warning_once(
                "drafter %r: %s not loaded, nor by vLLM's own DFlash. If the drafter was trained"
                ' with biases of its attention, add "drafter_overrides": {"attention_bias":'
                " true} to the speculative config; a mask embedding is read from %s.",
                self.spec.model,
                cut_off(", ".join(sorted(unread))),
                MASK_EMBEDDING_FILE,
            )
            for name in unread:
                del tensors[name]
        check_ids(self.spec, tensors, self._target_vocab_size)
        device = self.context.hidden_norm.weight.device
        mask_embedding: torch.Tensor | None = None
        content = get_hf_file_bytes(MASK_EMBEDDING_FILE, *self._files)
        if content is not None:
            mask_embedding = parse_mask_embedding(self.spec, content).to(device)
        with device:
            self.vocabulary = DraftVocabulary(self.spec, tensors, mask_embedding)
        others = [one for one in tensors.items() if not one[0].startswith(LATTICE)]
        loaded = AutoWeightsLoader(self).load_weights(others, mapper=self.checkpoint_names)
        if self.lattice is not None:
            own = load_head(self.lattice, tensors.items())
            loaded |= {f"lattice.{name}" for name in own}
        self.context.fuse_layers(self.block.attentions())
        return loaded
