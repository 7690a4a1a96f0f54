"""One batched block forward of the drafter over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dflash.engine.attention_groups import DraftAttentionGroup
from vllm_dflash.engine.block_layout import BlockInputs
from vllm_dflash.model.dflash2_layers import walk
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning import Floats, Ints


@dataclass(frozen=True)
class BlockDrafts:
    """Drafts of D requests."""

    requests: Ints
    """Batch rows of the drafted requests, [D]."""
    tokens: list[list[int]]
    """Drafts of each request, up to the first whose logits were not finite."""
    confidence: Floats
    """Probability of each token under the drafter, 0 past the end of a narrower block, [D, w]."""


NO_BLOCKS = BlockDrafts(np.zeros(0, np.int64), [], np.zeros((0, 0)))
"""The drafts of a step in which no blocks are drafted."""


class BlockForward:
    """Runs the drafter on blocks and picks the tokens."""

    def __init__(self, model: DFlashDraftModel, vllm_config: VllmConfig) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self.groups: list[DraftAttentionGroup] = []
        """Groups of layers that share attention metadata; set once the cache exists."""

    @property
    def reads_newest(self) -> bool:
        """Whether drafts also depend on the features of the newest context row (LiLiCorr)."""
        return self._model.spec.lilicorr is not None

    def draft(
        self, inputs: BlockInputs, block_table: torch.Tensor, newest: torch.Tensor | None
    ) -> BlockDrafts:
        """Draft for the D requests in the layout.

        Args:
            inputs: layout of their blocks.
            block_table: cache blocks of the whole batch, [R, blocks].
            newest: features of each drafted request's last context row, [D, m * H]; None unless
                `reads_newest`.
        """
        widths = np.diff(inputs.query_start_loc)
        query_start_loc = torch.from_numpy(inputs.query_start_loc)
        slots = torch.from_numpy(inputs.slots)
        table = block_table[torch.from_numpy(inputs.requests)]
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=torch.from_numpy(inputs.seq_lens),
            seq_lens_cpu_upper_bound=torch.from_numpy(inputs.seq_lens),
            num_reqs=len(inputs.requests),
            num_actual_tokens=len(slots),
            max_query_len=int(widths.max()),
            max_seq_len=int(inputs.seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
        )
        per_layer: dict[str, object] = {}
        for group in self.groups:
            per_layer |= dict.fromkeys(group.layer_names, group.build_metadata(metadata))
        hidden = self.run(
            per_layer,
            dict.fromkeys(per_layer, slots),
            torch.from_numpy(inputs.input_ids),
            torch.from_numpy(inputs.positions),
            torch.from_numpy(inputs.offsets),
        )
        lengths, bonus_ids = inputs.draft_lens, inputs.input_ids[inputs.query_start_loc[:-1]]
        rows = hidden[torch.from_numpy(inputs.predicting)]
        tokens, probability = self.pick(rows, lengths, bonus_ids, newest)
        confidence = np.zeros((len(lengths), int(lengths.max())))
        confidence[np.arange(confidence.shape[1]) < lengths[:, None]] = probability
        starts = np.cumsum(lengths) - lengths
        ends = starts + np.cumprod(confidence > 0, axis=1).sum(axis=1)
        drafts = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        return BlockDrafts(inputs.requests, drafts, confidence)

    def pick(
        self,
        hidden: torch.Tensor,
        lengths: Ints,
        bonus_ids: Ints,
        newest: torch.Tensor | None,
    ) -> tuple[list[int], Floats]:
        """Pick the most likely tokens.

        Args:
            hidden: hidden states of all rows that predict a token, [Q, H].
            lengths: number of these in each block, [D].
            bonus_ids: bonus token of each block, [D].
            newest: as for `draft`.

        Returns:
            Tokens, [Q], and their probability, 0 if the logits are not finite, [Q].
        """
        if self._model.has_candidates:
            return self._walk(hidden, lengths, bonus_ids, newest)
        logits = self._model.compute_logits(hidden).float()  # [Q, V]
        best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is the maximum
        probability = torch.exp(best - logits.logsumexp(dim=-1))
        probability = probability.where(torch.isfinite(best), 0.0)
        return self._model.target_ids(tokens).tolist(), probability.numpy()

    def _walk(
        self, hidden: torch.Tensor, lengths: Ints, bonus_ids: Ints, newest: torch.Tensor | None
    ) -> tuple[list[int], Floats]:
        """`pick` for drafters that choose each block's tokens one after the other.

        Blocks of equal width run together: in LiLiCorr, each token of a block affects all others.
        """
        model = self._model
        candidates, logits = model.compute_candidates(hidden)  # [Q, C]
        bonus, starts = torch.from_numpy(bonus_ids).long(), np.cumsum(lengths) - lengths
        fused = None if newest is None else model.context.fuse(newest)  # [D, H]
        tokens, probability = candidates[:, 0].clone(), torch.zeros(len(hidden))
        for width in np.unique(lengths):
            same_width = np.flatnonzero(lengths == width)  # [D']
            rows = torch.from_numpy(starts[same_width][:, None] + np.arange(width))  # [D', w]
            blocks = torch.from_numpy(same_width)
            scores = model.score_candidates(
                candidates[rows],
                logits[rows],
                hidden[rows],
                bonus[blocks],
                None if fused is None else fused[blocks],
            )
            tokens[rows], probability[rows] = walk(candidates[rows], scores)
        # The walk takes the largest score, which is not finite if any of that row is NaN.
        probability = probability.where(torch.isfinite(probability), 0.0)
        return tokens.tolist(), probability.numpy()

    def run(
        self,
        attn_metadata: dict[str, object] | None,
        slot_mapping: dict[str, torch.Tensor],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        offsets: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run blocks [Q] to hidden states [Q, H]. Without metadata, a dummy run: writes nothing."""
        with set_forward_context(
            attn_metadata,
            self._vllm_config,
            num_tokens=len(input_ids),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slot_mapping,
        ):
            return self._model(input_ids, positions, offsets=offsets)
