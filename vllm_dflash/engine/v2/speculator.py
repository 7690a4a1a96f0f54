"""The speculator for vLLM's Model Runner V2: vLLM's own, with our drafter, and the device decides.

A step, behind the target's, top to bottom; each line a kernel or a captured graph, none of which
the host waits for (`observe_verification`, then `propose`):

    grade     what became of the drafts that each request's slot holds        (grading.py)
    report    that goes to the host, which counts it and plans by it          (counted_output.py)
    block     the drafter: context stored, a block drafted, judged            (vLLM's graph)
    look up   what the requests' own texts predict                           (text_look_up.py)
    choose    whose drafts each request gets, with a chance for each          (choice.py)

Where attention backends allow it, vLLM then trims the drafts of the batch on the device, to a
budget of ours (`draft_budget.py`). The scheduler says whether a block is run (`directions.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.scheduled import newly_admitted
from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.confidence import judge
from vllm_dflash.engine.v2.counted_output import CountedOutput, VerifiedDrafts
from vllm_dflash.engine.v2.directions import Directions, directions_of
from vllm_dflash.engine.v2.draft_budget import DraftBudget, take_over_the_budget
from vllm_dflash.engine.v2.draft_slots import DraftSlots
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.loaded_speculator import LoadedSpeculator
from vllm_dflash.engine.v2.nan_counter import NanCounter
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.v2.texts_on_device import has_room_for_texts, keep_texts_on_device
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.planning.costs import StepCosts


class PlannedSpeculator(LoadedSpeculator):
    """vLLM's speculator with our draft model, chances, free drafts and statistics."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState | None
    ) -> None:
        """`req_states` are the model runner's; None where nothing is to run."""
        super().__init__(vllm_config, device)
        width = self.num_speculative_steps
        self.statistics = DraftStatistics(width)
        self.nan_counter = NanCounter(device)
        self.warm = WarmState(self.persistent_buffers)
        self.confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        self.slots = DraftSlots(self.max_num_reqs, width, device)
        self.outcomes = torch.zeros(self.max_num_reqs, OUTCOME_COLUMNS + width, device=device)
        self.texts: TextLookUp | None = None
        """What gives free drafts, if anything does."""
        if self.options.free_drafts and has_room_for_texts(self.max_num_reqs, self.max_model_len):
            self.texts = TextLookUp(self.max_num_reqs, self.max_model_len, width, device)
        if req_states is not None:
            self.req_states = req_states
            if self.texts is not None:
                keep_texts_on_device(req_states)
        self.candidates: CandidateSampler | None = None
        """What walks along the candidates of a DFlash 2 drafter."""
        if self.spec.dflash2 is not None:
            top_k = self.spec.dflash2.selector_top_k
            self.candidates = CandidateSampler(self.max_num_reqs, width, top_k, device)
        self.budget: DraftBudget | None = None
        """How many drafts are verified, where the device trims them."""
        self.directions = Directions(runs_block=True)
        """Of the step that runs."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self._verified: VerifiedDrafts | None = None
        """Of the step that runs."""
        self._runs_block = True

    def before_capture(self, runner: GPUModelRunner) -> None:
        """All is loaded, no graph is captured. What runs between graphs is compiled here: no
        request waits for that."""
        if self.options.is_planned:
            self.budget = take_over_the_budget(runner)
        if self.budget is not None:
            self.budget.warm_up()
        nobody = torch.zeros(1, dtype=torch.int64, device=self.device)
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.observe_verification(nobody, nothing, nothing)
        for self._runs_block in (False, True):
            self._choose(nobody, nothing, self.req_states.last_sampled_tokens)

    def capture(self) -> None:
        """Capture graphs of blocks."""
        self._runs_block = True
        super().capture()

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on drafts are verified by what steps cost."""
        if self.budget is not None:
            self.budget.costs = costs

    def persistent_buffers(self) -> list[torch.Tensor]:
        """What captured graphs read and write."""
        texts = [] if self.texts is None else self.texts.buffers()
        return super().persistent_buffers() + self.slots.buffers() + texts

    # --- every step -----------------------------------------------------------------------

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""
        self.newly_admitted = newly_admitted(step)
        self.directions = directions_of(step)
        if (learned := self.directions.learned) is not None:
            self.slots.set_rates(learned.block_rates, learned.text_rates)
        if self.budget is not None and step.total_num_scheduled_tokens:
            self.budget.expect(self.directions)

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Grade the drafts of the batch; vLLM's arguments, [R]."""
        if self.newly_admitted:
            places = self.req_states.req_id_to_index
            fresh = [places[name] for name in self.newly_admitted if name in places]
            self.slots.forget(async_tensor_h2d(np.array(fresh, np.int64), device=self.device))
        states = self.req_states
        texts, lens = states.all_token_ids.gpu, states.total_len.gpu
        grade(self.slots, idx_mapping, num_sampled, num_rejected, texts, lens, self.outcomes)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *inputs: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **more_inputs: Any,
    ) -> torch.Tensor:
        """Store this step's context and draft; arguments and result [R, K] are vLLM's.

        Of a request's K tokens only those count that the scheduler has places for.
        """
        count, places = input_batch.num_reqs, num_speculative_tokens
        if self.runs_target_alone:
            return self.draft_tokens[:count]
        if not dummy_run:
            self._verified = VerifiedDrafts(
                input_batch.req_ids, self.newly_admitted, self.outcomes[:count]
            )
            drafted = self.num_speculative_steps if places is None else places
            drafted *= self.directions.runs_block
            could_draft = self.directions.could_draft
            self.statistics.observe_uniform(drafted, count, could_draft=could_draft)
        self._runs_block = dummy_run or (self.directions.runs_block and places != 0)
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            last_sampled,
            *inputs,
            dummy_run=dummy_run,
            # A step without a block is no graph, but stores context all the same.
            is_profile=is_profile or not self._runs_block,
            # At 0, vLLM 0.33 stores context and is done; 0.32 does not look at it.
            num_speculative_tokens=places if self._runs_block else 0,
            **more_inputs,
        )
        if not dummy_run:
            self._choose(input_batch.idx_mapping, num_sampled, last_sampled)
        return self.draft_tokens[:count]

    def _choose(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, last_sampled: torch.Tensor
    ) -> None:
        """Whose drafts each request gets."""
        states = self.req_states
        if self.texts is not None:
            texts, lens = states.all_token_ids.gpu, states.total_len.gpu
            self.texts.look_up(texts, lens, idx_mapping, num_sampled)
        choose(
            self.slots,
            idx_mapping,
            num_sampled,
            last_sampled,
            self.draft_tokens,
            self.confidence if self._runs_block else None,
            self.texts,
            self.draft_token_confidence_probs,
        )

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        if not self._runs_block:
            return None
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _generate_draft(self, *args: Any, **kwargs: Any) -> None:
        if self._runs_block:
            super()._generate_draft(*args, **kwargs)

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        num_steps: int = 1,
    ) -> torch.Tensor:
        """The most likely token of each row [Q, H], whatever the temperature. Captured."""
        confidence = self.confidence.view(-1)[: len(hidden_states)]  # [Q]
        if self.candidates is not None:
            logits, drafts = self._walk(hidden_states)
        elif self.use_local_argmax_reduction:
            # Lengths are fixed: nobody asks how sure the drafter is. Only ids come back, so drafts
            # of NaN are neither seen nor counted; they are verified like others.
            confidence.fill_(1.0)
            return self.model.get_top_tokens(hidden_states)
        else:
            logits, drafts = self.compute_draft_logits(hidden_states, spec_step_idx), None  # [Q, V]
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        judge(logits, tokens, confidence)
        self.nan_counter.observe(confidence, idx_mapping >= 0)
        return self.model.target_ids(tokens) if drafts is None else drafts

    def _walk(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of DFlash 2 [Q], chosen one after the other, behind the scores [Q, C] of the
        candidates that each was chosen from."""
        assert self.candidates is not None
        assert self.model.selector is not None
        width = self.num_speculative_steps
        count = len(hidden_states) // width
        by_place = (count, width, -1)
        candidates, logits = self.model.compute_candidates(hidden_states)  # [R * K, C]
        candidates = candidates.view(by_place)
        bonus = self.input_buffers.input_ids[: count * (1 + width) : 1 + width]
        scores = self.model.selector(
            candidates, logits.view(by_place), hidden_states.view(by_place), bonus.long()
        )
        self.candidates.sample(
            candidates,
            scores,
            count,
            self.sample_pos,
            self.sample_idx_mapping,
            self.temperature,
            self.seeds,
            self.draft_tokens,
            None,  # no distribution is kept: drafts are the likeliest tokens
            self.use_fp64_gumbel,
        )
        # Scores behind what was chosen.
        return self.candidates.scores[:count].flatten(0, 1), self.draft_tokens[:count].flatten()

    def counted(self, output: AsyncOutput) -> AsyncOutput | CountedOutput:
        """The output of the step that ends, which sees to it that its drafts are counted."""
        verified, self._verified = self._verified, None
        if verified is None:
            return output
        return CountedOutput(output, verified, self.statistics)

    def clear_statistics(self) -> None:
        """Count from zero again."""
        self.statistics.clear()
        self.nan_counter.clear()

    def collect_statistics(self, *, waits: bool = True) -> DraftStatistics:
        """The statistics, with what the device counted: by now, or lately if nothing is to wait."""
        count = self.nan_counter.total if waits else self.nan_counter.lately
        self.statistics.nan_drafts = count()
        return self.statistics
