"""Computes the expected values, with the reference drafter and the Hugging Face target."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from reference.reference_drafter import ReferenceDrafter, target_step
from vllm_dflash.checkpoint.headers import INDEX
from vllm_dflash.checkpoint.read import read_drafter


@dataclass(frozen=True)
class Oracle:
    """A target and its drafter in plain PyTorch, in one dtype, on the CPU."""

    target: PreTrainedModel
    drafter: ReferenceDrafter

    @classmethod
    def load(
        cls,
        target: str,
        drafter: str,
        dtype: torch.dtype,
        revision: str | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Oracle:
        """Load both, downloading repositories. `revision` and `overrides` are for the drafter.

        Raises:
            OSError: one of them is missing.
            ValueError: one of them cannot be read (`DrafterError` for the drafter).
        """
        from huggingface_hub import snapshot_download

        spec = read_drafter(drafter, revision, overrides)
        folder = drafter
        if not Path(drafter).is_dir():
            files = [INDEX, "*.safetensors", "*.pt"]
            folder = snapshot_download(drafter, revision=revision, allow_patterns=files)
        model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval()
        reference = ReferenceDrafter.load(spec, folder)
        rotaries: list[Any] = [layer.rotary for layer in reference.layers]
        frequencies = [rotary.inv_freq for rotary in rotaries]
        reference.to(dtype)
        # Rounded to bfloat16, they are off by up to 0.4%: a radian at position 300.
        for rotary, exact in zip(rotaries, frequencies, strict=True):
            rotary.inv_freq = exact
        return cls(model, reference)

    def text(
        self, token_ids: Sequence[int], taps: Collection[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over T tokens. Returns logits [T, V] and outputs of taps [T, m * H]."""
        cache = DynamicCache(config=self.target.config)
        return target_step(self.target, torch.tensor([list(token_ids)]), cache, taps)

    @torch.inference_mode()
    def scores(
        self,
        logits: torch.Tensor,
        hidden: torch.Tensor,
        before: torch.Tensor,
        newest: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens that may be drafted at K positions, and their scores, [K, C] each.

        For DFlash, these are all tokens and their logits. For DFlash 2 and LiLiCorr, these are the
        most likely tokens, scored given the tokens before them, and for LiLiCorr also given the
        newest context.

        Args:
            logits: [K, V'].
            hidden: hidden states, [K, H].
            before: token before each position, [K].
            newest: fused features of the newest context row, [H].
        """
        if (lattice := self.drafter.lilicorr) is not None:
            embed = self.target.get_input_embeddings()
            candidates, scores = lattice.weigh(logits, hidden, newest, embed)
            # A token before that is not a candidate scores as the first one; `_gap` reports it.
            chosen = (candidates[:-1] == before[1:, None]).int().argmax(-1)
            return candidates, scores[torch.arange(len(scores)), F.pad(chosen, (1, 0))]
        selector = self.drafter.candidate_selector
        if selector is None:
            tokens = self.drafter.target_ids(torch.arange(logits.shape[-1]))
            return tokens.expand(len(logits), -1), logits
        values, candidates = logits.topk(selector.top_k, dim=-1)
        return candidates, selector.scores(candidates, values, hidden, before)

    @torch.inference_mode()
    def block(
        self,
        embedding: torch.Tensor,
        z: torch.Tensor,
        *,
        fed: Sequence[torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Run the drafter on one block after its context.

        Args:
            embedding: embedding of the block's rows, [Q, H].
            z: fused context, [C, H].
            fed: input of each layer and of the final norm, [Q, H] each, to use instead of the
                output of the previous layer, so that errors do not spread between stages.

        Returns:
            Outputs of the layers, and the output of the final norm, [Q, H] each.
        """
        positions = torch.arange(len(z) + len(embedding))
        outputs: list[torch.Tensor] = []
        stages = [*self.drafter.layers, self.drafter.norm]
        with ExitStack() as hooks:
            for number, stage in enumerate(stages):
                if fed is not None:
                    hooks.enter_context(stage.register_forward_pre_hook(_feed(fed[number])))
                keep = stage.register_forward_hook(lambda _, __, x: outputs.append(x[0]))
                hooks.enter_context(keep)
            self.drafter(embedding[None], z[None], positions[None])
        return outputs[:-1], outputs[-1]


def _feed(x: torch.Tensor) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda _, args: (x[None], *args[1:])
