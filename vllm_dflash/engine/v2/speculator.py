"""The speculator for vLLM's Model Runner V2: vLLM's own, with our drafter and draft lengths.

The captured draft step is vLLM's: its buffers, its input kernel (rejected rows and null blocks
are stored nowhere), its graphs, in which context is stored (where a graph runs) and every request
of the batch is drafted to the full. Ours is the draft model, and whether the block runs at all.

Draft lengths under synchronous scheduling are planned here, as on V1, and handed to the scheduler
as one number per request. Under asynchronous scheduling the scheduler plans
(`engine/scheduler.py`), since this step must not wait for its own outcome.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.model_loader import get_model
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as native
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.padding import have_own_drafts
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.v2.confidence import write_confidence
from vllm_dflash.engine.v2.device_counters import DeviceCounters
from vllm_dflash.engine.v2.drafter_config import drafter_layers, one_width
from vllm_dflash.engine.v2.trimming import why_untrimmed
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Step


class PlannedSpeculator(native.DFlashSpeculator):
    """vLLM's speculator with our draft model, planned lengths and statistics."""

    model: DFlashDraftModel
    vllm_config: VllmConfig
    enable_adaptive_verification: bool

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        """`req_states` are the model runner's."""
        super().__init__(vllm_config, device)
        self.engine_config = vllm_config
        """As the engine was started with it; vLLM's class changes its own copy."""
        self.req_states = req_states
        self.options = DFlashOptions.of(vllm_config)
        self.spec = self.options.drafter
        self.parallel_drafting_token_id = self.spec.mask_token_id
        self.requires_non_causal = not all(self.spec.causal)
        self.plans_lengths = not (
            vllm_config.scheduler_config.async_scheduling or self.enable_adaptive_verification
        )
        """Whether draft lengths are decided here, request by request."""
        self.untrimmed: str | None = None
        """Why the device does not trim drafts, under asynchronous scheduling."""
        self.lengths = LengthControl(self.num_speculative_steps)
        self.counters = DeviceCounters(device)
        self.warm = WarmState(self._persistent_buffers)
        self.confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        self.runs_target_alone = False
        """Whether dummy runs of the runner are to leave the drafter out."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self.step: Step | None = None
        """The one that runs, where it is planned here."""
        self._runs_block = True
        self._handed_over: dict[str, int] | None = None

    @property
    def length_limit(self) -> int:
        """Tokens a request may come to and be drafted. vLLM may lower its limit after start-up."""
        return min(self.max_model_len, drafted_length(self.draft_model_config))

    # --- start-up -------------------------------------------------------------------------

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> DFlashDraftModel:
        """Load our draft model and let it use the target's vocabulary."""
        config = drafter_layers(self.vllm_config, self.requires_non_causal)
        with set_model_tag("dflash_head"):
            model = get_model(vllm_config=config, model_config=self.draft_model_config)
        language_model = getattr(target_model, "get_language_model", lambda: target_model)()
        model.share_vocabulary(language_model)
        cover_positions(model, self.max_model_len)
        if self.enable_adaptive_verification or self.plans_lengths:
            return model
        self.untrimmed = why_untrimmed(self.engine_config, target_attn_layer_names)
        if self.untrimmed is None:  # hook 29
            self.speculative_config.enable_adaptive_verification = True
            self.enable_adaptive_verification = self.use_acceptance_estimator = True
        return model

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Capture blocks of one width: the lengths of the table are the target's."""
        whole, self.vllm_config = self.vllm_config, one_width(self.vllm_config)
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = whole

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Give each kind of layer metadata of its own."""
        super().set_attn(
            model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
        )
        for groups in self.attn_groups:
            wholes, groups[:] = list(groups), []
            for whole in wholes:
                block_size = whole.get_metadata_builder().kv_cache_spec.block_size
                groups += split_by_kind(
                    whole,
                    self.model.context.attentions,
                    self.attn_vllm_config,
                    self.device,
                    block_size,
                )
        self._configure_decode_metadata_update()

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        self.lengths.policy = Planner(
            self.num_speculative_steps, self.max_num_reqs, costs, whole_batch=True
        )

    # --- every step -----------------------------------------------------------------------

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
        *inputs: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **more_inputs: Any,
    ) -> torch.Tensor:
        """Store this step's context and draft; arguments and result [R, K] are vLLM's.

        Of a request's K tokens only those count that the scheduler is told of.
        """
        num_requests = input_batch.num_reqs
        if self.runs_target_alone:
            return self.draft_tokens[:num_requests]
        step = None
        self._runs_block = True
        if not dummy_run:
            wanted = self.num_speculative_steps
            if num_speculative_tokens is not None:
                wanted = num_speculative_tokens
            if self.plans_lengths:
                step = self.step = self._plan(input_batch, num_sampled, num_rejected, wanted)
                wanted = step.plan.width
            else:
                own = have_own_drafts(input_batch.req_ids, self.newly_admitted)
                self.counters.observe_verification(num_sampled, num_rejected, own)
                self.lengths.statistics.observe_uniform(wanted, num_requests)
            self._runs_block = wanted > 0
        is_timed = step is not None and self._runs_block
        with step.timing("draft") if step and is_timed else nullcontext():
            drafts = super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                *inputs,
                dummy_run=dummy_run,
                # A step without a block is no graph, but stores context all the same.
                is_profile=is_profile or not self._runs_block,
                # At 0, vLLM 0.33 stores context and is done; 0.32 does not look at it.
                num_speculative_tokens=num_speculative_tokens if self._runs_block else 0,
                **more_inputs,
            )
            if is_timed:
                confidence = self.confidence[:num_requests].cpu()  # waits for the block
        if step is not None:
            if step.plan.width:
                self._choose_lengths(step, confidence.numpy())
            self._handed_over = dict(zip(step.ids, step.lengths.tolist(), strict=True))
        return drafts

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
        if self.use_local_argmax_reduction:
            # Lengths are fixed: nobody asks how sure the drafter is. Only ids come back, so drafts
            # of NaN are neither seen nor counted; they are verified like others.
            return self.model.get_top_tokens(hidden_states)
        logits = self.compute_draft_logits(hidden_states, spec_step_idx)  # [Q, V]
        best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
        self.counters.observe_logits(best, idx_mapping >= 0)
        if self.plans_lengths:
            write_confidence(logits, best, out=self.confidence.view(-1))
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        return self.model.target_ids(tokens)

    def _plan(
        self,
        input_batch: InputBatch,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        wanted: int,
    ) -> Step:
        """Take what became of the last drafts, and say whom to draft."""
        step = Step(input_batch.req_ids, num_sampled.cpu().numpy(), rows=input_batch.num_tokens)
        drafted = input_batch.num_draft_tokens_per_req
        if drafted is not None:
            drafted = drafted * have_own_drafts(step.ids, self.newly_admitted)
            step.verified = np.where(step.decoding, drafted, 0)
            self.lengths.statistics.observe_verification(step)
        if self.lengths.take_skip(step):
            return step
        context_lens = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
        limits = np.minimum(
            self.req_states.max_seq_len[input_batch.idx_mapping_np], self.length_limit
        )
        step.limits = draft_limits(
            context_lens - num_rejected.cpu().numpy(), limits, wanted, step.decoding
        )
        self.lengths.plan(step)
        return step

    def _choose_lengths(self, step: Step, confidence: np.ndarray) -> None:
        """Decide how many drafts of each request the scheduler is told of."""
        plan = step.plan
        step.draft_rows = step.num_requests * self.num_query_per_req
        confidence = confidence[plan.drafted, : plan.width]
        finite = np.cumprod(confidence >= 0.0, axis=1)  # [D, w]
        usable = np.zeros_like(step.limits)
        usable[plan.drafted] = np.minimum(step.limits[plan.drafted], finite.sum(axis=1))
        self.lengths.choose(step, usable, confidence * finite)

    def cut(self, drafts: DraftTokenIds | None) -> DraftTokenIds | None:
        """Drafts as vLLM hands them over, cut to what was planned."""
        if drafts is None or self._handed_over is None:
            return drafts
        cut = [
            tokens[: self._handed_over[name]]
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]
        return DraftTokenIds(drafts.req_ids, cut)

    def end_step(self) -> None:
        """The runner is done with a step, or had none."""
        step, self.step = self.step, None
        self.warm.check()
        if step is not None:
            self.lengths.end(step)

    def collect_statistics(self) -> DraftStatistics:
        """The statistics, with what the device has counted meanwhile. Waits for it."""
        statistics = self.lengths.statistics
        statistics.nan_drafts = self.counters.nan_drafts()
        if not self.plans_lengths:
            blocks, drafts, accepted = self.counters.verifications()
            statistics.verifications = blocks
            statistics.draft_tokens, statistics.accepted_tokens = drafts, accepted
        return statistics

    def _persistent_buffers(self) -> list[torch.Tensor]:
        """What captured graphs read and write."""
        buffers = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        inputs = vars(self.input_buffers).values()
        return buffers + [value for value in inputs if isinstance(value, torch.Tensor)]
