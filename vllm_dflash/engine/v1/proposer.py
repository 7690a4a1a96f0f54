"""The proposer for vLLM's V1 model runner: what vLLM calls, in the order of a step."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import (
    bonus_tokens,
)
from vllm_dflash.engine.padding import have_own_drafts, newly_admitted
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v1.host_step import HostStep
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.planning.step import Step


class PlannedProposer(HostStep):
    """Drafts a block per request in one forward, in the place of vLLM's own proposer.

    Written for synchronous scheduling, which is what the V1 runner does on CPUs: the ragged
    lists it returns tell the scheduler each request's length.
    """

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.warm = WarmState(self._persistent_buffers)
        self.step: Step | None = None
        """The one that runs, from when the target's output is there."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""
        self.newly_admitted = newly_admitted(step)
        if self.texts is not None:
            self.texts.end(step.finished_req_ids)

    def drop_context(self, blocks: Collection[int], block_size: int) -> None:
        """Before a step: cache blocks that it gives to somebody else, or that are of no more use.

        The context that waits for them is not to be stored any more.
        """
        if self.backlog is not None:
            self.backlog.drop(blocks, block_size)

    def prepare_next_token_ids_padded(
        self,
        sampled_token_ids: torch.Tensor,
        requests: dict[str, CachedRequestState],
        gpu_input_batch: InputBatch,
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bonus token and number of tokens each request really got, [R] each.

        The first that the proposer hears of a step. Unlike vLLM's own, looks no token up for
        requests still in their prompt: those are not drafted, so their bonus token is never read.
        """
        num_requests, self.sampled = len(sampled_token_ids), sampled_token_ids.numpy()
        bonus, produced = bonus_tokens(
            self.sampled,
            discard_request_mask.numpy()[:num_requests],
            gpu_input_batch.vocab_size,
        )
        self.step = Step(gpu_input_batch.req_ids[:num_requests], produced.astype(np.int64))
        return torch.from_numpy(bonus), torch.from_numpy(produced)

    def prepare_inputs_padded(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        spec_decode_metadata: SpecDecodeMetadata,
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[CommonAttentionMetadata, None, torch.Tensor]:
        """The batch as it is, and how many drafts of each request were rejected, [R].

        Also the one place that sees what became of the drafts.
        """
        assert self.step is not None
        if not any(spec_decode_metadata.num_draft_tokens):
            return common_attn_metadata, None, torch.zeros_like(valid_sampled_tokens_count)
        drafted = np.array(spec_decode_metadata.num_draft_tokens)
        step, produced = self.step, self.step.produced
        tells = (produced > 0) & have_own_drafts(step.ids, self.newly_admitted)
        step.verified = np.where(tells, drafted, 0)  # a discarded sample says nothing
        self.lengths.observe_verification(step)
        rejected = np.where(drafted > 0, drafted + 1 - produced, 0)
        return common_attn_metadata, None, torch.from_numpy(rejected.astype(np.int32))

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: SamplingMetadata,
        mm_embed_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: dict[str, torch.Tensor] | list[dict[str, torch.Tensor]] | None = None,
    ) -> list[list[int]]:
        """Take this step's context and draft the next tokens.

        Args:
            num_speculative_tokens: drafts of a request at most.
            target_positions: of this step's T scheduled rows, [T].
            target_hidden_states: taps concatenated in ascending layer order, [T, m * H].
            next_token_ids: the bonus token of each request, [R].
            common_attn_metadata: of the target's batch, rejected rows included.
            num_rejected_tokens_gpu: rejected rows at each request's end, [R]; None if no
                drafts were verified.

        Returns:
            Drafts of each request, empty where none are worth it.
        """
        step, batch = self.step, common_attn_metadata
        assert step is not None
        rejected = num_rejected_tokens_gpu
        num_rejected = np.zeros(batch.num_reqs, np.int32) if rejected is None else rejected.numpy()
        step.rows = batch.num_actual_tokens
        context_lens = batch.seq_lens[: batch.num_reqs].numpy() - num_rejected
        step.context_lens = context_lens.astype(np.int64)
        self.keep_context(step, target_positions, target_hidden_states, batch, num_rejected)
        return self.drafts(step, batch, next_token_ids.numpy())

    def end_step(self) -> None:
        """The runner is done with a step, or had none."""
        step, self.step = self.step, None
        if step is not None:
            self.lengths.end(step)

    def clear_statistics(self) -> None:
        """Count from zero again."""
        self.lengths.statistics.clear()

    def collect_statistics(self) -> DraftStatistics:
        """What was counted so far."""
        return self.lengths.statistics

    def _persistent_buffers(self) -> list[torch.Tensor]:
        return [] if self.backlog is None else self.backlog.buffers()
