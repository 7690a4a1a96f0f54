"""V1's step: the host plans.

A step, behind the target's, top to bottom (`drafts`):

    outcome   what became of the drafts that the step verified               (length_control.py)
    context   of the tokens that came to stay: stored, or kept waiting        (backlog.py)
    look up   what the requests' own texts predict                            (text_drafts.py)
    plan      whom to draft, and how wide                     (length_control.py, the planner's)
    block     the drafter: context that these wait for stored, blocks drafted (block_forward.py)
    choose    block or text, and how many of its drafts are to be verified    (length_control.py)
    hand over to the scheduler, as lists of tokens                            (message.py)

A plan that drafts nobody holds for some steps, in which texts alone are looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import (
    block_inputs,
    draft_limits,
    kept_rows,
    length_limits,
    room_for_long_drafts,
)
from vllm_dflash.engine.v1.backlog import ContextBacklog
from vllm_dflash.engine.v1.block_forward import BlockDrafts
from vllm_dflash.engine.v1.length_control import NO_CONFIDENCE, LengthControl
from vllm_dflash.engine.v1.loaded_drafter import LoadedDrafter
from vllm_dflash.engine.v1.text_drafts import TextDrafts
from vllm_dflash.planning import Ints
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Step


class HostStep(LoadedDrafter):
    """A drafter that is loaded, and what a step does with it."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: GPUModelRunner
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.lengths = LengthControl(self.width)
        self.texts: TextDrafts | None = None
        """What gives free drafts, if anything does."""
        self.backlog: ContextBacklog | None = None
        """Without one, context is stored in every step."""
        self.all_drafted: Sequence[str] = ()
        """The last batch, if all of it was drafted."""
        self.has_drafts = False
        """Whether any draft of the last step is to be verified."""
        self.sampled = np.zeros((0, 1), np.int32)
        """What this step sampled, [R, most of any]."""

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        most_free = self.options.most_free
        self.lengths.policy = Planner(self.width, self.max_batch_size, costs, most_free=most_free)
        if most_free:
            sizes = self.max_batch_size, self.runner.max_model_len, most_free
            self.texts = TextDrafts(*sizes, shares_outputs=self.options.shares_outputs)
        # A connector hands the cache on with each step, so it must be complete. And of several
        # cache groups, blocks that another one is given would have to be looked after as well.
        if self.vllm_config.kv_transfer_config is None and self.num_cache_groups == 1:
            self.backlog = ContextBacklog(
                self.model.context,
                self.feature_width,
                self.dtype,
                num_slots=self.num_slots,
                block_size=self.block_size,
            )

    def drafts(
        self, step: Step, batch: CommonAttentionMetadata, bonus_ids: Ints
    ) -> list[list[int]]:
        """What each request of the batch is to have verified next; bonus tokens are [R]."""
        ends = length_limits(self.runner.requests, step.ids, self.runner.max_model_len)
        rests = self.lengths.take_skip(step)
        self._look_up(step, ends)
        if rests and step.predicted is None:
            return self._hand_over(step, None)
        if not rests:
            self._limit(step, batch, np.minimum(ends, self.length_limit))
        block, plan = None, self.lengths.plan(step)
        if plan.width:
            self._catch_up(step, batch)
            block = self._run_block(step, batch, bonus_ids)
        if plan.width or plan.uses_text:
            self._choose(step, block)
        return self._hand_over(step, block)

    def keep_context(
        self,
        step: Step,
        positions: torch.Tensor,
        features: torch.Tensor,
        batch: CommonAttentionMetadata,
        num_rejected: Ints,
    ) -> None:
        """Of all rows that the target did not reject."""
        slots = batch.slot_mapping[: len(features)]
        rows: slice | torch.Tensor
        if num_rejected[:-1].any():
            rows = torch.from_numpy(kept_rows(batch.query_start_loc_cpu.numpy(), num_rejected))
        else:  # what is kept is in one piece, so nothing need be copied
            rows = slice(len(features) - int(num_rejected[-1]))
        kept = features[rows], positions[rows], slots[rows]
        with step.timing("context"):
            if self.backlog is None:
                self.model.context.store(*kept)
                step.context_rows = len(kept[0])
            else:
                goes_on = step.ids == self.all_drafted  # it would not wait for long
                take = self.backlog.store_new if goes_on else self.backlog.add
                step.context_rows = take(*kept)

    def _look_up(self, step: Step, ends: Ints) -> None:
        """What texts predict, for requests that may come to so many tokens, [R]."""
        if self.texts is None:
            return
        with step.timing("planning"):
            texts, ends = self.runner.input_batch, ends.copy()
            # A prompt of embeddings has no tokens; what lies there was another request's.
            ends[list(texts.req_prompt_embeds)] = 0
            self.texts.look_up(
                step,
                texts.token_ids_cpu,
                np.arange(step.num_requests),
                ends,
                self.sampled.astype(np.int32, copy=False),  # not written down yet
                self._room_for_long_drafts(),
            )

    def _limit(self, step: Step, batch: CommonAttentionMetadata, ends: Ints) -> None:
        """How many drafts of a block each can use, and how much context waits for them."""
        step.limits = draft_limits(step.context_lens, ends, self.width, step.decoding)
        if self.backlog is not None:
            with step.timing("planning"):
                table = batch.block_table_tensor.numpy()
                step.waiting = self.backlog.count(table, step.context_lens)

    def _catch_up(self, step: Step, batch: CommonAttentionMetadata) -> None:
        """Store the context for which the requests that are drafted wait."""
        if self.backlog is None:
            return
        drafted = step.plan.drafted
        with step.timing("context"):
            table = batch.block_table_tensor.numpy()[drafted]
            step.context_rows += self.backlog.store(table, step.context_lens[drafted])

    def _run_block(
        self, step: Step, batch: CommonAttentionMetadata, bonus_ids: Ints
    ) -> BlockDrafts:
        """Blocks of all requests that are drafted, in one forward of the drafter."""
        inputs = block_inputs(
            step.context_lens,
            np.minimum(step.limits, step.plan.width) * step.plan.drafted,
            bonus_ids,
            self.spec.mask_token_id,
            batch.block_table_tensor.numpy(),
            self.block_size,
        )
        with step.timing("draft"):
            block = self.block.draft(inputs, batch.block_table_tensor)
        step.draft_rows = len(inputs.input_ids)
        return block

    def _choose(self, step: Step, block: BlockDrafts | None) -> None:
        """Whose drafts each request gets, and how many of them are verified."""
        usable = np.zeros_like(step.limits)
        if block is None:
            self.lengths.choose(step, usable, NO_CONFIDENCE)
            return
        usable[block.requests] = [len(tokens) for tokens in block.tokens]
        if self.texts is not None and step.plan.uses_text:
            self.texts.compare(step, block.requests, block.tokens)
        self.lengths.choose(step, usable, block.confidence)

    def _hand_over(self, step: Step, block: BlockDrafts | None) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in step.ids]
        if block is not None:
            for request, tokens in zip(block.requests.tolist(), block.tokens, strict=True):
                drafts[request] = tokens[: step.lengths[request]]
        if self.texts is not None:
            for request in np.flatnonzero(step.from_text & (step.lengths > 0)).tolist():
                drafts[request] = self.texts.tokens(request, int(step.lengths[request]))
        self.has_drafts = bool(step.lengths.any())
        self.all_drafted = step.ids if step.plan.drafted.all() else ()
        return drafts

    def _room_for_long_drafts(self) -> int:
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        return room_for_long_drafts(budget, len(self.runner.requests), self.width)
