"""Trimming drafts on the device: whether it is possible, and how many a step verifies.

vLLM's adaptive verification splits a budget of rows among the drafts of a batch on the device, by
their chances, in graphs that take ragged batches. vLLM's budget comes from a table of times and the
chances of one step. Ours comes from `planning/budget.py`, depends on what steps cost at the current
context lengths, and may be 0.

Whether such graphs can be captured depends on the backend of every attention layer, which is chosen
while the models are loaded. The acceptance estimator, the rejection sampler and metadata builders
copy the setting after the drafter is loaded, so we decide right after loading it. If trimming is
not possible, there are graphs for a few lengths (`config/engine_settings.py`): all requests of a
step share one of these, or the step runs piecewise. Without full graphs, any length is fine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.attn_utils import (
    get_attn_cg_support,
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.utils import AttentionGroup

from vllm_dflash.config.engine_options import EngineOptions
from vllm_dflash.engine.agreement import agreed_by_all
from vllm_dflash.engine.v2.budget_split import split
from vllm_dflash.engine.v2.exchange import Directions, HostCopy
from vllm_dflash.planning import Bools, Ints
from vllm_dflash.planning.budget import Load, RecentWorths, best_budget
from vllm_dflash.planning.costs import StepCosts

Layers = Mapping[str, AttentionLayerBase]

UNCONFIRMED = "FLASH_ATTN"
"""Backend with which trimming is off unless the user turns it on: on an H200, 5 of 15 engines that
trimmed crashed. Both causes are fixed (docs/benchmarks.md), but no GPU has confirmed that yet."""

HAS_ADMITTED_COUNTS = hasattr(adaptive_verification, "AdmittedDraftCounts")
"""Whether this vLLM wants the numbers of admitted drafts on the host, so that ranks may share the
sampling of a batch (0.33)."""


def why_untrimmed(config: VllmConfig, target_names: Collection[str]) -> str | None:
    """Reason why this engine's drafts are not trimmed on the device; None if all ranks can trim.

    Every rank must call this, after both models are loaded. `target_names`: names of the target's
    attention layers.
    """
    options = EngineOptions.of(config)
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    target = {name: layer for name, layer in layers.items() if name in target_names}
    drafter = {name: layer for name, layer in layers.items() if name not in target_names}
    why: str | None
    if not options.is_planned:
        why = "draft lengths are fixed"
    elif not options.may_trim:
        why = "enable_adaptive_verification is false"
    else:
        why = obstacle(config, target, drafter, 1 + options.num_speculative_tokens)
        backends = (layer.get_attn_backend().get_name() for layer in target.values())
        if why is None and UNCONFIRMED in backends:
            why = f"not confirmed on {UNCONFIRMED} yet (enable_adaptive_verification: true: on)"
    return why if agreed_by_all(why is None) else why or "it does not hold on another rank"


def obstacle(config: VllmConfig, target: Layers, drafter: Layers, max_query_len: int) -> str | None:
    """Reason why vLLM's adaptive verification is not possible here; None if it is.

    vLLM would stop with an error for each of these, and name an option that the user did not set.

    `target`, `drafter`: attention layers by name. `max_query_len`: rows of a request, 1 + drafts.
    """
    if not config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return "full CUDA graphs are off"
    if config.lora_config is not None:
        return "LoRA is on"
    for owner, setting in (
        (config.aux_output_config, "enable_return_routed_experts"),
        (config.model_config, "return_sampling_mask"),
        (None if HAS_ADMITTED_COUNTS else config.parallel_config, "enable_batch_sharded_sampling"),
    ):
        if getattr(owner, setting, False):
            return f"{setting} is on"
    groups = [list(groups_of(config, target)), list(groups_of(config, drafter))]
    backend = get_query_lens_mismatch_unsupported_backend(groups[:1])
    if backend is not None:
        return f"{backend} must know each request's rows on the host"
    turned_on = copy(config)
    turned_on.speculative_config = copy(config.speculative_config)
    assert turned_on.speculative_config is not None
    turned_on.speculative_config.enable_adaptive_verification = True  # backends read it
    ragged = get_varlen_cudagraph_unsupported_backend(groups[:1], turned_on, max_query_len)
    if ragged is not None:
        return f"{ragged[0]} has no CUDA graphs for ragged batches"
    # vLLM checks only the target's layers, but captures what all layers support.
    support = get_attn_cg_support(groups, turned_on)
    if support.min_cg_support.value < AttentionCGSupport.UNIFORM_BATCH.value:
        return f"{support.min_cg_attn_backend} has no full CUDA graphs for batches of drafts"
    return None


def groups_of(config: VllmConfig, layers: Layers) -> Iterator[AttentionGroup]:
    """One group per layer, with the class of its metadata builder, which vLLM's checks ask."""
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        if spec is None:  # it shares another layer's cache
            continue
        backend = layer.get_attn_backend()
        builder: Any = backend.get_builder_cls()
        yield AttentionGroup(backend, [name], spec, 0, metadata_builders=[builder])


def lengths_to_choose(runner: GPUModelRunner, max_draft: int) -> list[int]:
    """Draft lengths that all requests of a step can share, ascending: from 0 to K for chains, and
    more for trees. Call this after graphs are captured."""
    if runner.adaptive_verification is not None:
        return [0, max_draft]  # the device trims what is not worth it
    manager = runner.cudagraph_manager
    captured = {graph.uniform_token_count for graph in manager.graphs} if manager else set()
    lengths = {count - 1 for count in captured if count}
    if not lengths:
        return list(range(max_draft + 1))
    return sorted(lengths | {0, max_draft})


STEPS_TO_ARRIVE = 3
"""Steps after which a copy to the host has arrived."""


class Sent(NamedTuple):
    """Chances of all slots, on their way to the host."""

    step: int
    had_block: bool
    """Whether that step ran a block."""
    chances: HostCopy


class DraftBudget(AdaptiveVerificationManager):
    """Replaces vLLM's manager in a runner. All ranks decide alike: they have the same chances, and
    are sent the same costs."""

    costs: StepCosts | None = None
    """Costs of steps; None until they are measured."""
    directions = Directions(runs_block=False)
    """Directions for the current step."""
    recent: RecentWorths
    fair: bool
    """Whether lengths are planned for each request's speed; see `planning.objective`."""
    rows_of_block: int
    """1 + K."""
    _share = 1.0
    """Share of the drafts that the last computed budget had room for."""
    _min_verified = 0
    """Minimum number of drafts to verify, from the previous step's directions."""
    _had_block = False
    """Whether the last step ran a block."""
    _steps = 0
    _began: Ints
    """First step after each slot's prompt, [S]. Chances of the step before it count; earlier ones
    belong to a chunk of the prompt, which has no drafts, or to the slot's last request."""
    _taken = -3
    """Step whose chances were added to `recent` last."""
    _sent: deque[Sent]
    """Chances on their way to the host, oldest first. Those of three steps ago have arrived, since
    tokens of a later step have, on the same stream. All ranks use these, and not whatever has
    arrived, so that they decide alike."""

    @classmethod
    def instead_of(
        cls,
        whole: AdaptiveVerificationManager,
        width: int,
        copy_stream: torch.cuda.Stream,
        *,
        fair: bool = False,
    ) -> DraftBudget:
        """Copy vLLM's manager, for blocks of K drafts; `copy_stream`: vLLM's stream for outputs."""
        budget = cls.__new__(cls)
        budget.__dict__.update(vars(whole))
        sizes = whole.req_states.max_num_reqs, whole.num_speculative_steps
        budget.recent, budget.fair = RecentWorths(*sizes, fair=fair), fair
        budget.rows_of_block = 1 + width
        budget._began = np.full(whole.req_states.max_num_reqs, -3)
        budget._sent, budget._copy_stream = deque(), copy_stream
        return budget

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """Skip vLLM's profiling, which takes half a minute at start: its times are not used here.
        Its blocks would also have more rows than fit if graphs have a request for each row.
        """
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Do nothing: `costs` are set once they are measured (`engine/profile.py`)."""

    def begin_step(self, directions: Directions) -> None:
        """Take the directions for a step that is about to run."""
        self._had_block = self.directions.runs_block
        self._min_verified, self.directions = self.directions.min_verified, directions
        self._steps += 1
        while len(self._sent) > 1 and self._sent[1].step <= self._steps - STEPS_TO_ARRIVE:
            self._sent.popleft()
        if self.costs is not None and directions.learned is not None:
            self.costs.records[:] = directions.learned.costs

    def add_request(self, req_idx: int) -> None:
        """Clear a slot for a new request, whose first drafts are placeholders."""
        self._before_writing()
        self._confidence_probs[req_idx].fill_(0.0)
        self.recent.forget(req_idx)
        self._began[req_idx] = self._steps + 1  # or later

    def _before_writing(self) -> None:
        if self._sent:
            self._sent[-1].chances.before_writing()

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Keep the chances of a step's drafts, and start copying them to the host. vLLM's own
        manager waits here for those of the step before."""
        self._before_writing()
        rows = confidence_probs[: input_batch.num_reqs]
        self._confidence_probs[input_batch.idx_mapping] = rows
        if self.directions.has_new_plan or not self._sent:
            chances = HostCopy(self._confidence_probs, self._copy_stream)
            self._sent.append(Sent(self._steps, self.directions.runs_block, chances))

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Choose a budget, and return the step's rows after trimming; vLLM's arguments.

        All drafts are verified until costs are known (during vLLM's warm-up).
        """
        names, states = list(num_tokens_per_req), self.req_states
        count = len(names)
        tokens = np.fromiter(num_tokens_per_req.values(), np.int32, count)
        given = map(len, map(draft_tokens.get, names, repeat(())))
        drafts = np.fromiter(given, np.int32, count)
        slots = np.fromiter(map(states.req_id_to_index.__getitem__, names), np.int64, count)
        others = tokens - drafts
        most = min(int(drafts.sum()), self._max_total_logits - count * self.num_bonus_tokens)
        budget = max(most, 0)
        if self.costs is not None:
            context, prompts = states.num_computed_tokens_np[slots], states.prefill_len.np[slots]
            self._began[slots[context <= prompts]] = self._steps
            if self.directions.has_new_plan:
                decodes = context + others >= prompts
                budget = self._best(slots, drafts, others, most, context, decodes)
                self._share = budget / most if most > 0 else self._share
            else:
                budget = max(round(self._share * most), min(self._min_verified, most), 0)
        self._batch_budget = (
            dict(zip(names, drafts.tolist(), strict=True)),
            dict(zip(names, others.tolist(), strict=True)),
            budget,
        )
        return int(others.sum()) + budget

    def _best(
        self, slots: Ints, drafts: Ints, others: Ints, most: int, context: Ints, decodes: Bools
    ) -> int:
        """Number of drafts to verify, `most` at most. For each of R requests, [R]: its slot, its
        numbers of drafts and other rows, its tokens of context, and whether it decodes."""
        assert self.costs is not None
        count = len(slots)
        if self._sent and self._taken < self._sent[0].step <= self._steps - STEPS_TO_ARRIVE:
            step, had_block, sent = self._sent[0]
            self._taken = step
            # Chances of a step without a block say nothing about a block's drafts.
            known = slots[(had_block == self._had_block) & (self._began[slots] <= step + 1)]
            if len(known):
                self.recent.add(known, sent.wait()[known])
        if most > 0 and decodes.any():
            has_drafts = drafts > 0
            load = Load(
                num_requests=int(decodes.sum()),
                rows=int(others.sum()),
                context=float(context[decodes].sum()),
                mean_context=float(context[has_drafts].mean()),
                block_rows=self.directions.runs_block * count * self.rows_of_block,
                block_context=self.directions.window.attended_in_all(context),
            )
            scores, steps = self.recent.sample(slots[has_drafts], drafts[has_drafts])
            chosen = self.costs, load, scores, steps, most, self._min_verified
            return best_budget(*chosen, fair=self.fair)
        return 0

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Split the budget on the device; vLLM's arguments and result."""
        *parts, budget = self._batch_budget
        rows = np.array([[*map(part.__getitem__, req_ids)] for part in parts], np.int32)
        self._split(idx_mapping, async_tensor_h2d(rows, idx_mapping.device), budget)
        ends = self._cu_num_logits[: len(req_ids) + 1]
        found = ends, self.query_start_loc, budget
        if not HAS_ADMITTED_COUNTS:
            return found
        admitted = None
        # The host knows the counts if all are admitted or none.
        if self._copy_admitted_drafts_to_host and 0 < budget < rows[0].sum():
            counts = self._batch_draft_capacity[: len(req_ids)]
            torch.sub(ends[1:], ends[:-1], out=counts).sub_(self.num_bonus_tokens)
            admitted = HostCopy(counts, self._copy_stream)  # waited for in this step
        return *found, admitted

    def _split(self, slots: torch.Tensor, rows: torch.Tensor, budget: int) -> None:
        ends = self._cu_num_logits, self.query_start_loc
        batch = slots, rows, budget, self.num_bonus_tokens
        split(self._confidence_probs, *batch, *ends, fair=self.fair)

    def warm_up(self) -> None:
        """Compile the split of a budget for few requests and for many, before any request waits."""
        device = self._confidence_probs.device
        for count in (1, len(self._confidence_probs)):
            rows = torch.ones(2, count, dtype=torch.int32, device=device)
            self._split(torch.arange(count, device=device), rows, budget=count)
