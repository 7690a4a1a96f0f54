"""The speculator for vLLM's Model Runner V2: vLLM's own, around our step (`device_step.py`).

Methods above "every step" are called once, when an engine starts, the others in every step.
`sample_draft` is captured with the drafter's block.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
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
from vllm_dflash.engine.scheduler_output import newly_admitted
from vllm_dflash.engine.v2.block_timer import BlockTimer
from vllm_dflash.engine.v2.confidence import find_likeliest
from vllm_dflash.engine.v2.device_step import DeviceStep
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts
from vllm_dflash.engine.v2.exchange import CountedOutput, Directions, HostCopy, directions_of
from vllm_dflash.engine.v2.loaded_speculator import LoadedSpeculator
from vllm_dflash.engine.v2.text_look_up import TextLookUp, has_room_for_texts
from vllm_dflash.engine.v2.trees.draft_trees import DraftTrees
from vllm_dflash.engine.v2.trimming import DraftBudget
from vllm_dflash.engine.warm import WarmState


class PlannedSpeculator(LoadedSpeculator):
    """vLLM's speculator with our draft model, chances, free drafts and statistics."""

    batch: Batch
    """Batch of the current step, set after the target has run."""
    req_states: RequestState
    """The model runner's request states."""
    draft_token_confidence_probs: torch.Tensor
    """Chances of the drafts in `handed_over`, [max R, W]."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        width, sizes = self.num_speculative_steps, (self.max_num_reqs, self.max_model_len)
        texts = None
        if self.options.free_drafts and has_room_for_texts(*sizes):
            texts = TextLookUp(*sizes, width, device)
        self.confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        drafts = Drafts(self.draft_tokens, self.confidence, self.draft_token_confidence_probs)
        self.handed_over = self.draft_tokens
        """Drafts for vLLM, [max R, W]."""
        self.trees: DraftTrees | None = None
        places, nodes = self.options.num_speculative_tokens, self.options.tree_nodes
        if nodes:
            self.trees = DraftTrees(self.max_num_reqs, width, places, nodes, device)
            self.handed_over = self.trees.tokens
            self.draft_token_confidence_probs = self.trees.chances
        self.device_step = DeviceStep(self.max_num_reqs, drafts, texts, self.trees)
        self.statistics = DraftStatistics(places)
        self.timer = BlockTimer(device) if self.options.chooses_window else None
        """Times blocks, if draft windows are chosen."""
        self.warm = WarmState(self._owners)
        self.candidates: CandidateSampler | None = None
        """Chooses among a DFlash 2 or LiLiCorr drafter's candidates, token by token; else None."""
        if (top_k := self.spec.num_candidates) is not None:
            self.candidates = CandidateSampler(self.max_num_reqs, width, top_k, device)
        self.budget: DraftBudget | None = None
        """How many drafts are verified, if the device trims them; else None."""
        self.directions = Directions(runs_block=True)
        """Directions for the current step."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self._report: HostCopy | None = None
        """Outcomes of drafts in the current step, on the way to the host."""
        self._window_report: list[dict[str, Any]] = []
        self._runs_block = True
        self.num_dummy_requests = 0
        """Requests of the last dummy run; a graph may pad them to more than were asked for."""

    def before_capture(self, runner: GPUModelRunner) -> None:
        """Called after loading and before graphs are captured. Places hooks 16 and 17, and compiles
        the kernels that run between graphs, so that no request waits for them."""
        if self.options.is_planned and runner.adaptive_verification is not None:  # hook 16
            self.budget = DraftBudget.instead_of(
                runner.adaptive_verification,
                self.num_speculative_steps,
                runner.output_copy_stream,
                fair=self.options.is_fair,
            )
            self.budget.warm_up()
            runner.adaptive_verification = self.budget
        if self.trees is not None:  # hook 17
            self.trees.attach(runner, self.draft_attn_layer_names)
        nothing = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.observe_verification(nothing.long(), nothing, nothing)
        for has_block in (False, True):
            self.device_step.before_block(self.batch, None)
            self.device_step.after_block(self.batch, has_block=has_block)

    def capture(self) -> None:
        """Capture graphs of blocks."""
        self._runs_block = True
        super().capture()

    # --- every step -----------------------------------------------------------------------

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Take the directions for a step that is about to run."""
        self.newly_admitted = newly_admitted(scheduler_output)
        self.directions = directions_of(scheduler_output)
        self._window_report = self.directions.window_report or self._window_report
        if self.directions.counted is not None:
            self.statistics.take_over(self.directions.counted)
        if self.windowed is not None and self.directions.runs_block:
            self.windowed.attend_to(self.directions.window)
        if self.trees is not None:
            self.trees.begin_step(scheduler_output)
        if (learned := self.directions.learned) is not None:
            self.device_step.slots.set_rates(learned.block_rates, learned.text_rates)
        if self.budget is not None and scheduler_output.total_num_scheduled_tokens:
            self.budget.begin_step(self.directions)

    def observe_verification(
        self, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Take vLLM's slots and counts of the batch, [R] each, after the target has run."""
        states = self.req_states
        texts = states.all_token_ids.gpu, states.total_len.gpu
        numbers = idx_mapping, num_sampled, num_rejected
        self.batch = Batch(*numbers, *texts, states.last_sampled_tokens)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        *inputs: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **more_inputs: Any,
    ) -> torch.Tensor:
        """Store this step's context and draft; arguments and result [R, W] are vLLM's.

        Only the drafts that the scheduler has places for count.
        """
        count, places = input_batch.num_reqs, num_speculative_tokens
        has_room = True
        if dummy_run:  # may have more requests than vLLM's scheduler lets into a step
            self.num_dummy_requests = count
            has_room = count * self.num_query_per_req <= self.max_num_tokens
        if self.runs_target_alone or not has_room:
            return self.handed_over[:count]
        runs_block = self._runs_block = dummy_run or (self.directions.runs_block and places != 0)
        if not dummy_run:
            if self.trees is not None:
                self.trees.settle(input_batch, features=inputs[3])
            self.device_step.before_block(self.batch, self._fresh_slots())
        timer = self.timer if runs_block and not dummy_run else None
        with timer.timing() if timer else nullcontext():
            super().propose(  # stores the context, and drafts the block
                input_batch,
                *inputs,
                dummy_run=dummy_run,
                # A step without a block cannot use the graph, but still stores context.
                is_profile=is_profile or not runs_block,
                # At 0, vLLM 0.33 only stores context; 0.32 ignores the number.
                num_speculative_tokens=places if runs_block else 0,
                **more_inputs,
            )
        if not dummy_run:
            self.device_step.after_block(self.batch, has_block=runs_block)
            self._report = self.device_step.report
            drafted = self.handed_over.shape[1] if places is None else places
            could_draft = self.directions.could_draft
            self.statistics.observe_length(count * runs_block, drafted, could_draft=could_draft)
        return self.handed_over[:count]

    def _fresh_slots(self) -> torch.Tensor | None:
        """Slots of newly admitted requests, [N]; None (in most steps) if there are none."""
        if not self.newly_admitted:
            return None
        slots = self.req_states.req_id_to_index
        fresh = [slots[name] for name in self.newly_admitted if name in slots]
        return async_tensor_h2d(np.array(fresh, np.int64), device=self.device)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        if not self._runs_block:
            return None
        return super()._build_uniform_attn_metadata(*args, **kwargs)

    def _generate_draft(self, *args: Any, **kwargs: Any) -> None:
        if self._runs_block:
            super()._generate_draft(*args, **kwargs)

    def sample_draft(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Most likely token of each row, [Q, H] -> [Q], at any temperature. Captured."""
        confidence = self.confidence.view(-1)[: len(hidden_states)]  # [Q]
        if self.candidates is not None:
            logits, drafts = self._walk(hidden_states)
        else:
            logits, drafts = self.model.compute_logits(hidden_states), None  # [Q, V]
        if self.trees is not None and self.trees.is_attached and drafts is None:
            return self.trees.find_candidates(logits, confidence, self.model.target_ids)
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        find_likeliest(logits, tokens, confidence)
        return self.model.target_ids(tokens) if drafts is None else drafts

    def _walk(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of each row's candidates, [Q, C], and the tokens chosen from them one after the
        other, [Q]."""
        assert self.candidates is not None
        width = self.num_speculative_steps
        count = len(hidden_states) // width
        by_place = (count, width, -1)
        candidates, logits = self.model.compute_candidates(hidden_states)  # [R * K, C]
        candidates = candidates.view(by_place)
        bonus = self.input_buffers.input_ids[: count * (1 + width) : 1 + width]
        scores = self.model.score_candidates(
            candidates,
            logits.view(by_place),
            hidden_states.view(by_place),
            bonus.long(),
            None if self.newest_context is None else self.newest_context[:count],
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
            None,  # keep no distribution: drafts are the likeliest tokens
            self.use_fp64_gumbel,
        )
        # Scores given the tokens that were chosen.
        return self.candidates.scores[:count].flatten(0, 1), self.draft_tokens[:count].flatten()

    def wrap_output(self, output: AsyncOutput) -> AsyncOutput | CountedOutput:
        """Wrap the output of the step that ends, so that its drafts are counted."""
        report, self._report = self._report, None
        took = None if self.timer is None else self.timer.end_step()
        return output if report is None else CountedOutput(output, report, self.statistics, took)

    def window_report(self) -> list[dict[str, Any]] | None:
        """What the scheduler has last chosen windows by; None: windows are not chosen."""
        return self._window_report if self.options.chooses_window else None

    def _owners(self) -> tuple[object, ...]:
        windowed = () if self.windowed is None else self.windowed.owners()
        return self, self.input_buffers, *self.device_step.owners(), *windowed
