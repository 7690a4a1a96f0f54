"""The speculator for vLLM's Model Runner V2: vLLM's own, with our drafter and draft lengths.

The captured draft step is vLLM's: its buffers, its input kernel (rejected rows and null blocks
are stored nowhere), its graphs, in which context is stored (where a graph runs) and every request
of the batch is drafted to the full. Ours is the draft model, and whether the block runs at all.

Draft lengths under synchronous scheduling are planned in the worker, as on V1, and handed to the
scheduler as one number per request (`synchronous.py`). Under asynchronous scheduling the scheduler
plans (`engine/scheduler.py`), since a step must not wait for its own outcome: nothing here does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.model_loader import get_model
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as native
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.config.draft_config import drafted_length
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.engine.attention_groups import split_by_kind
from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.text_drafts import TextDrafts
from vllm_dflash.engine.v2.confidence import write_confidence
from vllm_dflash.engine.v2.counted_output import CountedOutput, VerifiedDrafts
from vllm_dflash.engine.v2.drafter_config import drafter_layers, one_width
from vllm_dflash.engine.v2.host_copy import texts_on_host
from vllm_dflash.engine.v2.nan_counter import NanCounter
from vllm_dflash.engine.v2.synchronous import SynchronousLengths
from vllm_dflash.engine.v2.trimming import why_untrimmed
from vllm_dflash.engine.vllm_fixes.short_rotary_tables import cover_positions
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.model.draft_model import DFlashDraftModel
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner


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
        self.untrimmed: str | None = None
        """Why the device does not trim drafts, under asynchronous scheduling."""
        self.lengths = LengthControl(self.num_speculative_steps)
        self.nan_counter = NanCounter(device)
        self.warm = WarmState(self.persistent_buffers)
        self.confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        self.synchronous: SynchronousLengths | None = None
        """Decides draft lengths, request by request, where they are decided here."""
        if not (vllm_config.scheduler_config.async_scheduling or self.enable_adaptive_verification):
            self.synchronous = SynchronousLengths(
                self.lengths,
                None if self.use_local_argmax_reduction else self.confidence,
                runs_ahead=device.type == "cuda",
            )
        self.runs_target_alone = False
        """Whether dummy runs of the runner are to leave the drafter out."""
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self._verified: VerifiedDrafts | None = None
        """Of the step that runs, under asynchronous scheduling."""
        self._runs_block = True

    @property
    def length_limit(self) -> int:
        """Tokens a request may come to and be drafted. vLLM may lower its limit after start-up."""
        return min(self.max_model_len, drafted_length(self.draft_model_config))

    @property
    def texts(self) -> TextDrafts | None:
        """What gives free drafts, if anything does."""
        return None if self.synchronous is None else self.synchronous.texts

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
        if self.enable_adaptive_verification or self.synchronous is not None:
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
        most_free = 0
        texts = texts_on_host(self.req_states) if self.options.free_drafts else None
        if self.synchronous is not None and texts is not None:
            most_free = self.num_speculative_steps
            found = TextDrafts(self.max_num_reqs, self.max_model_len, most_free)
            self.synchronous.read_texts(found, texts)
        self.lengths.policy = Planner(
            self.num_speculative_steps,
            self.max_num_reqs,
            costs,
            most_free=most_free,
            whole_batch=True,
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
        if self.runs_target_alone:
            return self.draft_tokens[: input_batch.num_reqs]

        def run(runs_block: bool) -> torch.Tensor:
            self._runs_block = runs_block
            return super(PlannedSpeculator, self).propose(
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
                is_profile=is_profile or not runs_block,
                # At 0, vLLM 0.33 stores context and is done; 0.32 does not look at it.
                num_speculative_tokens=num_speculative_tokens if runs_block else 0,
                **more_inputs,
            )

        if dummy_run:
            return run(True)
        wanted = self.num_speculative_steps
        if num_speculative_tokens is not None:
            wanted = num_speculative_tokens
        if self.synchronous is None:
            trimmed_rejected = num_rejected if self.enable_adaptive_verification else None
            self._verified = VerifiedDrafts(input_batch, self.newly_admitted, trimmed_rejected)
            self.lengths.statistics.observe_uniform(wanted, input_batch.num_reqs)
            return run(wanted > 0)
        limits = self.req_states.max_seq_len[input_batch.idx_mapping_np]
        return self.synchronous.propose(
            run,
            input_batch,
            num_sampled,
            num_rejected,
            most=wanted,
            limits=np.minimum(limits, self.length_limit),
            newly_admitted=self.newly_admitted,
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
        if self.use_local_argmax_reduction:
            # Lengths are fixed: nobody asks how sure the drafter is. Only ids come back, so drafts
            # of NaN are neither seen nor counted; they are verified like others.
            return self.model.get_top_tokens(hidden_states)
        logits = self.compute_draft_logits(hidden_states, spec_step_idx)  # [Q, V]
        best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
        if self.synchronous is not None:
            write_confidence(logits, best, out=self.confidence.view(-1))
        else:
            self.nan_counter.observe(best, idx_mapping >= 0)
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
        return self.model.target_ids(tokens)

    def counted(self, output: AsyncOutput) -> AsyncOutput | CountedOutput:
        """The output of the step that ends, which sees to it that its drafts are counted."""
        verified, self._verified = self._verified, None
        if verified is None:
            return output
        return CountedOutput(output, verified, self.lengths.statistics)

    def cut(self, drafts: DraftTokenIds | None) -> DraftTokenIds | None:
        """Drafts as vLLM hands them over, cut to what was planned, where it was planned here."""
        if drafts is None or self.synchronous is None:
            return drafts
        return self.synchronous.cut(drafts)

    def end_step(self) -> None:
        """The runner is done with a step, or had none."""
        if self.synchronous is not None:
            self.synchronous.end_step()

    def clear_statistics(self) -> None:
        """Count from zero again."""
        self.lengths.statistics.clear()
        self.nan_counter.clear()

    def collect_statistics(self, *, waits: bool = True) -> DraftStatistics:
        """The statistics, with what the device counted: by now, or lately if nothing is to wait."""
        statistics = self.lengths.statistics
        if self.synchronous is None:
            count = self.nan_counter.total if waits else self.nan_counter.lately
            statistics.nan_drafts = count()
        return statistics

    def persistent_buffers(self) -> list[torch.Tensor]:
        """What captured graphs read and write."""
        buffers = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        inputs = vars(self.input_buffers).values()
        return buffers + [value for value in inputs if isinstance(value, torch.Tensor)]
