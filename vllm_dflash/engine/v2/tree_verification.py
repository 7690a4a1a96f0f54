"""Draft trees are verified by sampling, on V2 with vLLM's own sampler: a token behind the bonus
token and behind each node, as plain decoding would sample it there.

vLLM draws by request and position, so a seeded request gets what plain decoding would draw,
wherever its drafts are a tree (chains are verified as ever: the same distribution, other draws).
Two nodes of one depth draw alike, but only one of them is on the way down, and no draw is used
twice.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    get_max_chunk_logits,
)

from vllm_dflash.engine.draft_trees import DraftTrees, VerifiedTrees
from vllm_dflash.engine.v2.host_copy import HostCopy


class TreeVerifier(RejectionSampler):
    """vLLM's for chains, and that for trees. Waits for the device where there are trees."""

    trees: DraftTrees
    sampled: HostCopy | None = None
    """What the last step with drafts sampled, [R, 1 + K], on its way to the host."""

    @classmethod
    def of(cls, whole: RejectionSampler, trees: DraftTrees) -> TreeVerifier:
        """One that is set up as vLLM's is."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(whole))
        made.trees = trees
        return made

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Logits [T + R, V] of T drafts and R bonus rows to tokens [R, 1 + K]."""
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        step = self.trees.step
        if step is not None:
            sampled = self._sample_rows(logits, input_batch, step)
            requests = np.array([*step.trees])
            tokens = np.full((len(requests), output.sampled_token_ids.shape[1]), -1, np.int64)
            produced = np.zeros(len(requests), np.int32)
            for number, (_, found) in enumerate(step.descend(sampled)):
                tokens[number, : len(found)] = found
                produced[number] = len(found)
            rows = np.array([1 + len(tree.tokens) for tree in step.trees.values()], np.int32)
            at = torch.from_numpy(requests).to(logits.device)
            for given, values in (
                (output.sampled_token_ids, tokens),
                (output.num_sampled, produced),
                (output.num_rejected, rows - produced),
            ):
                given[at] = torch.from_numpy(values).to(given)
        self.sampled = HostCopy(output.sampled_token_ids)
        return output

    def _sample_rows(
        self, logits: torch.Tensor, batch: InputBatch, step: VerifiedTrees
    ) -> np.ndarray:
        """A token behind each row of each tree, [trees + N]."""
        first, end = batch.cu_num_logits_np[:-1], batch.cu_num_logits_np[1:]
        numbers = np.concatenate([np.arange(first[each], end[each]) for each in step.trees])
        found = []
        for rows in torch.from_numpy(numbers).split(get_max_chunk_logits(logits.shape[1])):
            rows = rows.to(logits.device)
            at = batch.logits_indices[rows]
            sampled, _ = self.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping,
                batch.idx_mapping_np,
                batch.positions[at],
                batch.input_ids[at],
                batch.expanded_local_pos[rows],
                batch.seq_lens_cpu_upper_bound.numpy(),
            )
            found.append(sampled)
        return torch.cat(found).cpu().numpy()
