"""Embeddings and logits of a block, from the target or from the drafter's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.model.adapters import WithoutLoRA


class DraftVocabulary(nn.Module):
    """Embedding and head of a drafter, each its own if the checkpoint has one.

    Otherwise it uses the target's functions, not its weights, so that whatever those do (Gemma's
    embedding scale, a logit softcap, tensor-parallel gathering) is done exactly once and rounded
    exactly as in the target.
    """

    def __init__(
        self, spec: DrafterSpec, found: Container[str], mask_embedding: torch.Tensor | None
    ) -> None:
        """`found`: names of the checkpoint's tensors; `mask_embedding`: [H], if it has one."""
        super().__init__()
        self.spec = spec
        self.gives_log_probs = spec.lilicorr is not None
        self._embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._embed_candidates: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._head_of_candidates: VocabParallelEmbedding | None = None
        if "embed_tokens.weight" in found:
            self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size)
            self._embed = lambda token_ids: self.embed_tokens(token_ids)
        scale, cap = spec.logit_scale if spec.lilicorr is None else 1.0, None
        if spec.dflash2 is not None:
            scale, cap = spec.dflash2.output_multiplier, spec.dflash2.final_logit_softcapping
        self.logits_processor = LogitsProcessor(spec.draft_vocab_size, scale=scale, soft_cap=cap)
        if "lm_head.weight" in found:
            self.lm_head = ParallelLMHead(spec.draft_vocab_size, spec.hidden_size)
            self._head = lambda hidden: self.logits_processor(self.lm_head, hidden)
        self.d2t: nn.Parameter | None = None
        if "d2t" in found:
            offsets = torch.zeros(spec.draft_vocab_size, dtype=torch.int64)
            self.d2t = nn.Parameter(offsets, requires_grad=False)
        self.mask_embedding = mask_embedding

    def share(self, target: Any) -> None:
        """Use the target's function for whatever the checkpoint does not have.

        Raises:
            ValueError: a DFlash 2 or LiLiCorr drafter needs the target's tensors, and they are not
                found.
        """
        if self.spec.dflash2 is not None:
            self._share_tensors(target)
            return
        without_lora = WithoutLoRA(target)
        self._embed_candidates = without_lora(lambda token_ids: target.embed_input_ids(token_ids))
        if self._embed is None:
            self._embed = self._embed_candidates
        if self.gives_log_probs:
            self._head_of_candidates = self._head_tensors(target, "LiLiCorr")
            return
        if self._head is None:
            self._head = without_lora(lambda hidden: target.compute_logits(hidden))

    def _share_tensors(self, target: Any) -> None:
        """Share the target's tensors: DFlash 2 scales embeddings and logits by its own config."""
        inner = getattr(target, "model", target)
        with WithoutLoRA(target):
            if hasattr(inner, "get_input_embeddings"):
                table = inner.get_input_embeddings()  # transformers models use other names
            else:
                table = getattr(inner, "embed_tokens", None) or getattr(inner, "embedding", None)
        table = _shared(getattr(self, "embed_tokens", table), "embedding", target, "DFlash 2")
        self._embed = lambda token_ids: table(token_ids)
        self._head_of_candidates = self._head_tensors(target, "DFlash 2")

    def _head_tensors(self, target: Any, kind: str) -> VocabParallelEmbedding:
        """Head of the drafter, or else of its target; `kind` names the drafter in messages."""
        head = getattr(self, "lm_head", getattr(target, "lm_head", None))
        return _shared(head, "head", target, kind)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [Q, H] of the target's token ids [Q]."""
        assert self._embed is not None
        x = self._embed(token_ids)
        if self.mask_embedding is not None:
            is_mask = (token_ids == self.spec.mask_token_id).unsqueeze(-1)
            x = torch.where(is_mask, self.mask_embedding.to(x.dtype), x)
        return x if self.spec.dflash2 is None else x * self.spec.dflash2.input_embedding_scale

    def embed_candidates(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings [..., H] of ids [...], even if the drafter has its own."""
        assert self._embed_candidates is not None
        return self._embed_candidates(token_ids.flatten()).unflatten(0, token_ids.shape)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits over the drafter's vocabulary, [Q, V'], of hidden states [Q, H]."""
        assert self._head is not None
        return self._head(hidden_states)

    def candidates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and float32 logits of the C most probable tokens for rows [Q, H]: [Q, C] each.

        For LiLiCorr, log-probabilities over the full vocabulary instead of logits.
        """
        assert self.spec.num_candidates is not None
        return self.logits_processor.get_top_k_tokens(
            self._head_of_candidates,
            hidden_states,
            self.spec.num_candidates,
            return_log_probs=self.gives_log_probs,
        )

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of ids in the drafter's vocabulary; `d2t` holds the difference."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def _shared(tensors: Any, what: str, target: Any, kind: str) -> VocabParallelEmbedding:
    """`tensors`, if they are vLLM's kind of embedding or head. Raises `ValueError` otherwise."""
    if isinstance(tensors, VocabParallelEmbedding):
        return tensors
    raise ValueError(
        f"a {kind} drafter reads the {what} of its target, and vLLM cannot share the {what} of"
        f" {type(target).__name__}. Use a drafter with its own {what}, or leave the speculative"
        " config out."
    )


def check_ids(
    spec: DrafterSpec, tensors: Mapping[str, torch.Tensor], target_vocab_size: int
) -> None:
    """Refuse tensors that embed or draft other ids than the target's.

    Raises:
        DrafterError: the drafter's own embedding has too few rows, or `d2t` leads to an id outside
            the target's vocabulary.
    """

    def refuse(why: str) -> DrafterError:
        return DrafterError(
            f"drafter {spec.model!r} does not fit its target: {why}, and the target has"
            f" {target_vocab_size} tokens. Choose a drafter trained for this target."
        )

    if "embed_tokens.weight" in tensors and spec.vocab_size < target_vocab_size:
        raise refuse(f"its own embedding has {spec.vocab_size} rows")
    if "d2t" in tensors:
        offsets = tensors["d2t"].to(torch.int64)
        ids = offsets + torch.arange(len(offsets), device=offsets.device)
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= target_vocab_size:
            raise refuse(f"d2t leads to tokens {least} to {most}")
