"""A step on Model Runner V2: vLLM's speculator, with our draft model and our choice of drafts.

`propose` is the step, after the target. The host waits for nothing in it, and launches one kernel
and a graph:

    grade     see which of each slot's drafts were accepted                  (grading.py)
    report    send that to the host, if the plan wants it                    (exchange.py)
    graph     prepare inputs, store context, draft a block                   (vLLM's)
              find or draw the block's tokens, and their confidence          (confidence.py,
                                                                             draft_noise.py)
              learn from what was graded, count it                           (grading.py)
              look up what the requests' own texts predict                   (text_look_up.py)
              choose block or text for each request, and rate each draft     (choice.py)
              grow trees of the drafts, if they may be trees                 (trees/)

The scheduler's plan says whether a block runs (`v2_scheduler.py`). Without one, a graph of its own
stores context and chooses texts. The target's graph ends with fusing the taps
(`loaded_speculator.py`). What is verified is drawn as plain decoding would (`drawing.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler

from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.scheduler_output import newly_admitted
from vllm_dflash.engine.v2.choice import choose
from vllm_dflash.engine.v2.confidence import find_argmax
from vllm_dflash.engine.v2.draft_noise import DraftNoise, noise_of
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.exchange import HostCopy, ReportedOutput, StepPlan, plan_of
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade, learn_overall
from vllm_dflash.engine.v2.loaded_speculator import DFlashSpeculatorBase
from vllm_dflash.engine.v2.text_look_up import TextLookUp, has_room_for_texts, keep_texts_on_device
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees
from vllm_dflash.engine.warm import WarmState

ASSIGN_BUDGET = getattr(adaptive_verification, "_assign_draft_token_budget", None)
"""vLLM's function that chooses the drafts to verify with adaptive verification. vLLM compiles it
within the first requests, also for its own drafter (0.7 s each of three times on an H200)."""


class PlannedSpeculator(DFlashSpeculatorBase):
    """vLLM's speculator with our draft model, chances, free drafts and statistics."""

    draft_token_confidence_probs: torch.Tensor
    """Chances of the drafts in `draft_output`, [max R, W], for vLLM's adaptive verification."""

    def __init__(self, vllm_config: VllmConfig, runner: GPUModelRunner) -> None:
        super().__init__(vllm_config, runner.device)
        width, device, states = self.num_speculative_steps, self.device, runner.req_states
        sizes, self.req_states = (self.max_num_reqs, self.max_model_len), states
        self.free_drafts: TextLookUp | None = None
        if self.options.free_drafts and has_room_for_texts(*sizes):
            self.free_drafts = TextLookUp(*sizes, width, device)
            keep_texts_on_device(states)
        texts = states.all_token_ids.gpu, states.total_len.gpu, states.last_sampled_tokens
        self.batch = Batch.allocate(self.max_num_reqs, *texts)
        self.slots = DraftSlots(self.max_num_reqs, width, device)
        self.outcomes = torch.zeros(self.max_num_reqs, OUTCOME_COLUMNS + width, device=device)
        confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        self.drafts = Drafts(self.draft_tokens, confidence, self.draft_token_confidence_probs)
        self.draft_output = self.draft_tokens
        """Drafts for vLLM, [max R, W]."""
        self.trees: DraftTrees | None = None
        max_drafts, nodes = self.options.num_speculative_tokens, self.options.tree_nodes
        if nodes:
            self.trees = DraftTrees(self.max_num_reqs, width, max_drafts, nodes, device)
            self.draft_output = self.trees.tokens
            self.draft_token_confidence_probs = self.trees.chances
        self.candidates: CandidateSampler | None = None
        """Chooses among a DFlash 2 or LiLiCorr drafter's candidates, token by token; else None."""
        if (top_k := self.spec.num_candidates) is not None:
            self.candidates = CandidateSampler(self.max_num_reqs, width, top_k, device)
        self.draws_drafts = False
        """Whether drafts are drawn, at temperature > 0, with the noise of verification."""
        self.statistics = DraftStatistics(max_drafts)
        self.warm = WarmState(self._owners, late=getattr(ASSIGN_BUDGET, "__code__", None))
        self.plan = StepPlan()
        """Plan of the current step."""
        self._fresh: set[str] = set()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self._copies = runner.output_copy_stream
        self._report: HostCopy | None = None
        """Outcomes of drafts in the current step, on the way to the host."""
        self.num_dummy_requests = 0
        """Requests of the last dummy run; a graph may pad them to more than were asked for."""

    def before_capture(self, runner: GPUModelRunner) -> None:
        """Called after loading and before graphs are captured. Places the hook "draft trees", and
        compiles the kernels of steps without graphs, so that no request waits for them."""
        if self.trees is not None:
            self.trees.attach(runner, self.draft_attn_layer_names)
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._grade(nothing.long(), nothing, nothing)
        self.batch.clear()
        for self.runs_block in (False, True):
            self._choose_drafts(1)

    # --- every step -----------------------------------------------------------------------

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Take the plan of a step that is about to run."""
        self._fresh = newly_admitted(scheduler_output)
        plan = self.plan = plan_of(scheduler_output)
        if self.trees is not None:
            self.trees.begin_step(scheduler_output)
        if plan.counted is not None:
            self.statistics.merge_scheduler_counters(plan.counted)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor],
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *states: torch.Tensor,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Grade the last drafts, store this step's context, and draft. The drafts beyond the plan's
        lengths do not count. Arguments and result, [R, W], are vLLM's."""
        plan, count = self.plan, input_batch.num_reqs
        if dummy_run:
            self.num_dummy_requests = count
            if self.skips_dummy_run(count):
                return self.draft_output[:count]
            self.batch.clear()
        context = self.fused_taps(aux_hidden_states)
        if not dummy_run:
            if self.trees is not None:
                self.trees.settle(input_batch, context)
            if self._fresh:
                self.slots.forget(self._slots_of(self._fresh))
            self._grade(input_batch.idx_mapping, num_sampled, num_rejected)
            if plan.reports:
                table = self.outcomes[:count]
                self._report = HostCopy(self._copies, table, self.slots.counts_before)
        # vLLM 0.33 drafts nothing after some steps, whatever was planned.
        self.runs_block = dummy_run or (plan.runs_block and num_speculative_tokens != 0)
        super().propose(  # replays the graph, or calls `_generate_draft`
            input_batch,
            attn_metadata,
            slot_mappings,
            context,
            None,
            num_sampled,
            num_rejected,
            *states,
            dummy_run=dummy_run,
            **options,
        )
        if not dummy_run:
            blocks = plan.each_length(count) if self.runs_block else []
            self.statistics.record_blocks(blocks, any_eligible=plan.any_eligible)
        return self.draft_output[:count]

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """Draft a block, and choose the drafts of the batch's first requests. Captured."""
        if self.runs_block:
            super()._generate_draft(num_reqs, *args, **kwargs)  # calls `sample_draft`
        self._choose_drafts(num_reqs)

    def _choose_drafts(self, num_reqs: int) -> None:
        batch, slots, has_block = self.batch.first(num_reqs), self.slots, self.runs_block
        learn_overall(slots, batch, self.outcomes)
        if self.free_drafts is not None:
            self.free_drafts.look_up(batch)
        choose(slots, batch, self.drafts, self.free_drafts, has_block=has_block)
        if self.trees is not None:
            self.trees.grow(slots, batch, self.drafts, has_block=has_block)

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        row_slots: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Token of each row, [Q, H] -> [Q]: the most likely, or drawn. Captured."""
        confidence = self.drafts.confidence.view(-1)[: len(hidden_states)]  # [Q]
        noise = self._noise(positions, row_slots) if self.draws_drafts else None
        if self.candidates is not None:
            logits, drafts = self._walk(hidden_states, noise)
        else:
            logits, drafts = self.model.compute_logits(hidden_states), None  # [Q, V]
        if self.trees is not None and self.trees.is_attached and drafts is None:
            return self.trees.find_candidates(logits, confidence, self.model.target_ids)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        find_argmax(logits, tokens, confidence, noise=noise if drafts is None else None)
        return self.model.target_ids(tokens) if drafts is None else drafts

    def _noise(self, positions: torch.Tensor, row_slots: torch.Tensor) -> DraftNoise:
        """The noise that will verify what these rows predict, [Q] each."""
        requests = self.temperature, self.seeds, self.model.vocabulary.d2t
        return DraftNoise(row_slots, positions, *requests, self.use_fp64_gumbel)

    def _walk(
        self, hidden_states: torch.Tensor, noise: DraftNoise | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of each row's candidates, [Q, C], and the tokens chosen from them one after the
        other, [Q]."""
        assert self.candidates is not None
        width, rows = self.num_speculative_steps, self.num_query_per_req
        count = len(hidden_states) // width
        by_position = (count, width, -1)
        candidates, logits = self.model.compute_candidates(hidden_states)  # [R * K, C]
        candidates = candidates.view(by_position)
        bonus = self.input_buffers.input_ids[: count * rows : rows]
        scores = self.model.score_candidates(
            candidates,
            logits.view(by_position),
            hidden_states.view(by_position),
            bonus.long(),
            None if self.newest_context is None else self.newest_context[:count],
        )
        added: torch.Tensor | None = None
        if noise is not None:
            added = noise_of(candidates.flatten(0, 1), noise).view(by_position)  # [R, K, C]
            scores = scores + added.unsqueeze(2)  # [R, K, C, C]
        self.candidates.sample(
            candidates,
            scores,
            count,
            self.sample_pos,
            self.sample_idx_mapping,
            self.temperature,
            self.seeds,
            self.draft_tokens,
            None,  # the largest scores, which may have noise
            self.use_fp64_gumbel,
        )
        scores = self.candidates.scores[:count]  # given the tokens that were chosen
        if added is not None:
            scores = scores - added
        return scores.flatten(0, 1), self.draft_tokens[:count].flatten()

    def _grade(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Grade the last drafts of R requests; vLLM's slots and counts, [R] each."""
        if self._report is not None:
            self._report.before_writing()
            self._report = None
        chains = None if self.trees is None else self.trees.slots.chains
        graded = idx_mapping, num_sampled, num_rejected
        grade(self.slots, self.batch, *graded, self.outcomes, chains)

    def _slots_of(self, names: set[str]) -> torch.Tensor:
        """Slots of these requests on the device, [N]; those that have ended have none."""
        slots = self.req_states.req_id_to_index
        found = [slots[name] for name in names if name in slots]
        return async_tensor_h2d(np.array(found, np.int64), device=self.device)

    def wrap_output(self, output: AsyncOutput) -> AsyncOutput | ReportedOutput:
        """Add the report to the output of the step that ends, if it has one."""
        if self._report is None:
            return output
        return ReportedOutput(output, self._report, self.statistics)

    def read_counts(self) -> np.ndarray:
        """Take what the device has counted, [2, 4], into the statistics. Waits for the device."""
        (counts,) = HostCopy(self._copies, self.slots.counts).wait()
        self.statistics.take_counts(counts)
        return counts

    def _owners(self) -> tuple[object, ...]:
        trees = self.trees
        of_trees = () if trees is None else (trees, trees.slots, trees.candidates)
        buffers = self.input_buffers, self.batch, self.slots, self.drafts, self.candidates
        return self, *buffers, self.free_drafts, *of_trees
