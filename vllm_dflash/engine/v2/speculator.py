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
from torch.nn.functional import pad
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler
from vllm.v1.worker.gpu.states import RequestState

from vllm_dflash.engine.length_control import LengthControl
from vllm_dflash.engine.padding import newly_admitted
from vllm_dflash.engine.statistics import DraftStatistics
from vllm_dflash.engine.text_drafts import TextDrafts
from vllm_dflash.engine.v2.confidence import write_confidence
from vllm_dflash.engine.v2.counted_output import CountedOutput, VerifiedDrafts
from vllm_dflash.engine.v2.device_trees import DeviceTrees, attach_device_trees
from vllm_dflash.engine.v2.host_copy import texts_on_host
from vllm_dflash.engine.v2.likely_tokens import LikelyTokens
from vllm_dflash.engine.v2.loaded_speculator import LoadedSpeculator
from vllm_dflash.engine.v2.nan_counter import NanCounter
from vllm_dflash.engine.v2.synchronous import SynchronousLengths
from vllm_dflash.engine.warm import WarmState
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.planner import Planner


class PlannedSpeculator(LoadedSpeculator):
    """vLLM's speculator with our draft model, planned lengths and statistics."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        """`req_states` are the model runner's."""
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.lengths = LengthControl(self.num_speculative_steps)
        self.nan_counter = NanCounter(device)
        self.warm = WarmState(self.persistent_buffers)
        self.confidence = torch.zeros(self.draft_tokens.shape, device=device)  # [max R, K]
        self.candidates: CandidateSampler | None = None
        """What walks along the candidates of a DFlash 2 drafter."""
        if self.spec.dflash2 is not None:
            self.candidates = CandidateSampler(
                self.max_num_reqs,
                self.num_speculative_steps,
                self.spec.dflash2.selector_top_k,
                device,
            )
        self.likely: LikelyTokens | None = None
        """What trees can be made of, where drafts may be trees."""
        if self.is_synchronous and isinstance(self.options.draft_tree, int):
            vocab_size = self.draft_model_config.get_vocab_size()
            size = self.max_num_reqs, self.num_speculative_steps
            self.likely = LikelyTokens.of(self.spec, vocab_size, size, device)
        self.synchronous: SynchronousLengths | None = None
        """Decides draft lengths, request by request, where they are decided here."""
        if self.is_synchronous:
            self.synchronous = SynchronousLengths(
                self.lengths,
                self.num_speculative_steps,
                None if self.use_local_argmax_reduction else self.confidence,
                runs_ahead=device.type == "cuda",
            )
        self.newly_admitted: Collection[str] = ()
        """Requests whose drafts in this step are vLLM's placeholders."""
        self._verified: VerifiedDrafts | None = None
        """Of the step that runs, under asynchronous scheduling."""
        self._runs_block = True

    def branch(self, runner: GPUModelRunner) -> None:
        """From now on drafts are trees, if they are to be. Before graphs are captured."""
        trees = attach_device_trees(runner, self.options.draft_tree)
        if trees is None or self.synchronous is None:
            self.likely = None
            return
        self.synchronous.trees = trees
        self.lengths.statistics = DraftStatistics(max(self.num_speculative_steps, trees.budget))

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""
        self.newly_admitted = newly_admitted(step)
        if self.texts is not None:
            self.texts.end(step.finished_req_ids)
        if self.trees is not None:
            self.trees.expect(step)

    @property
    def trees(self) -> DeviceTrees | None:
        """What makes trees of drafts, if anything does."""
        return None if self.synchronous is None else self.synchronous.trees

    @property
    def texts(self) -> TextDrafts | None:
        """What gives free drafts, if anything does."""
        return None if self.synchronous is None else self.synchronous.texts

    def persistent_buffers(self) -> list[torch.Tensor]:
        """What captured graphs read and write."""
        owners = [each for each in (self.likely, self.trees) if each is not None]
        return super().persistent_buffers() + [one for each in owners for one in each.buffers()]

    def adapt_lengths(self, costs: StepCosts) -> None:
        """From now on plan draft lengths, starting from these costs."""
        most_free = 0
        texts = texts_on_host(self.req_states) if self.options.free_drafts else None
        if self.synchronous is not None and texts is not None:
            most_free = self.num_speculative_steps
            sizes = self.max_num_reqs, self.max_model_len, most_free
            found = TextDrafts(*sizes, shares_outputs=self.options.shares_outputs)
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
        if self.trees is not None:
            self.trees.settle(input_batch, slot_mappings, aux_hidden_states or [])
        limits = self.req_states.max_seq_len[input_batch.idx_mapping_np]
        drafts = self.synchronous.propose(
            run,
            input_batch,
            num_sampled,
            num_rejected,
            most=wanted,
            limits=np.minimum(limits, self.length_limit),
            newly_admitted=self.newly_admitted,
        )
        return pad(drafts, (0, self.engine_config.num_speculative_tokens - drafts.shape[1]))

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
        if self.candidates is not None:
            return self._walk(hidden_states, idx_mapping, draft_step)
        if self.use_local_argmax_reduction:
            # Lengths are fixed: nobody asks how sure the drafter is. Only ids come back, so drafts
            # of NaN are neither seen nor counted; they are verified like others.
            return self.model.get_top_tokens(hidden_states)
        logits = self.compute_draft_logits(hidden_states, spec_step_idx)  # [Q, V]
        best, tokens = logits.max(dim=-1)  # a NaN anywhere in a row is its maximum
        self._judge(logits, best, idx_mapping, draft_step)
        if self.likely is not None:
            self.likely.write(logits, self.model.target_ids)
        return self.model.target_ids(tokens)

    def _walk(
        self, hidden_states: torch.Tensor, idx_mapping: torch.Tensor, draft_step: torch.Tensor
    ) -> torch.Tensor:
        """`sample_draft` for DFlash 2, whose tokens are chosen one after the other."""
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
        if self.likely is not None:
            self.likely.write_pairs(candidates, scores)
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
        given = self.candidates.scores[:count].flatten(0, 1)  # [R * K, C], behind what was chosen
        self._judge(given, given.amax(dim=-1), idx_mapping, draft_step)
        return self.draft_tokens[:count].flatten()

    def _judge(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        idx_mapping: torch.Tensor,
        draft_step: torch.Tensor,
    ) -> None:
        """Write down how sure the drafter is of the best of each row's logits, [Q, V] and [Q]."""
        if self.synchronous is not None:
            write_confidence(logits, best, out=self.confidence.view(-1))
        else:
            self.nan_counter.observe(best, idx_mapping >= 0)
        self._maybe_predict_acceptance(logits, idx_mapping, draft_step)

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
