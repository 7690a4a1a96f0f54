"""Hook 31 on Model Runner V2: where draft trees meet its steps, under synchronous scheduling.

The host knows the trees of a step before it runs, so all that the device is told is which nodes
each row sees and how deep it stands. Under asynchronous scheduling the host would know neither.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dflash.engine.block_layout import Ints, room_for_long_drafts
from vllm_dflash.engine.branching import granted, may_branch, target_layers, why_chains
from vllm_dflash.engine.draft_trees import DraftTrees, VerifiedTrees
from vllm_dflash.engine.log import logger
from vllm_dflash.engine.padding import newly_admitted
from vllm_dflash.engine.v2.tree_kernel import TreeRows
from vllm_dflash.engine.v2.tree_layers import TreeLayers, can_attend
from vllm_dflash.engine.v2.tree_verification import TreeVerifier
from vllm_dflash.planning.draft_tree import Candidates
from vllm_dflash.planning.rehearsal import rehearse_trees
from vllm_dflash.planning.step import Likeliest, Step
from vllm_dflash.seams import Seam, check_seams

DEVICE_TREES = (
    Seam("vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn", "self input_batch"),
    Seam(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
        "self logits input_batch draft_logits invalid_drafts",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.sampler:Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids"
        " expanded_local_pos seq_lens_upper_bound_np return_logprobs",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward",
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
)
"""Used where drafts are trees."""
VLLMS_OWN_PROCESSORS = ("logit bias", "penalties", "bad words")
"""Which requests with trees do not use."""


class DeviceTrees:
    """The trees of a runner's requests, and their way through its steps."""

    def __init__(self, runner: GPUModelRunner, layers: Mapping[str, Any], budget: int) -> None:
        """Of up to `budget` nodes each; `layers` are the target's attention."""
        self.budget = budget
        self.kept = DraftTrees(budget)
        device, most_rows = runner.device, runner.max_num_tokens
        self._rows = TreeRows(
            torch.zeros(most_rows, dtype=torch.int64, device=device),
            torch.zeros(most_rows, dtype=torch.int32, device=device),
            torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=device),
        )
        self._layers = TreeLayers(layers, self._rows, budget)
        self._likely = runner.speculator.likely
        self._step_tokens, self._width = most_rows, runner.speculator.num_speculative_steps
        self._branching: dict[str, bool] = {}
        """Whether drafts of each living request may be trees."""
        self._drafts: Mapping[str, list[int]] = {}
        """Of this step, as the scheduler lists them: as many as there are, but not which."""
        runner.prepare_attn = functools.partial(self._prepare_attn, runner)
        self._verifier = TreeVerifier.of(runner.rejection_sampler, self.kept)
        runner.rejection_sampler = self._verifier

    def buffers(self) -> list[torch.Tensor]:
        """What captured graphs read."""
        return [*vars(self._rows).values()]

    def expect(self, step: SchedulerOutput) -> None:
        """A step is about to run."""
        for name in step.finished_req_ids:
            self._branching.pop(name, None)
        for request in step.scheduled_new_reqs:
            self._branching[request.req_id] = may_branch(
                request.sampling_params, draws_by_position=True
            )
        self.kept.forget(newly_admitted(step))  # with placeholders, at most
        self._drafts = step.scheduled_spec_decode_tokens

    def _prepare_attn(self, runner: GPUModelRunner, batch: InputBatch) -> Any:
        """In the place of the runner's: its slots are those of a list, the positions of a tree."""
        found = GPUModelRunner.prepare_attn(runner, batch)
        starts = batch.query_start_loc_np[: batch.num_reqs]
        step = self.kept.begin(
            batch.req_ids,
            [
                self.kept.first_tokens(each, len(self._drafts.get(each, ())))
                for each in batch.req_ids
            ],
            starts,
            batch.num_computed_tokens_np,
            self._branching,
        )
        self._layers.has_trees = step is not None
        self._layers.are_all_trees = step is not None and len(step.trees) == batch.num_reqs
        self._tell(batch, starts, step)
        return found

    def _tell(self, batch: InputBatch, starts: Ints, step: VerifiedTrees | None) -> None:
        """Write down how the batch's rows hang together; `starts` are the first of each request.

        Also of a batch without trees, for graphs: a chain's row sees all before it.
        """
        depths = np.arange(batch.num_tokens) - np.repeat(starts, batch.num_scheduled_tokens)
        all_before = (np.uint64(1) << np.arange(64, dtype=np.uint64)) - np.uint64(1)
        ancestors = np.append(all_before, ~np.uint64(0))[np.minimum(depths, 64)]
        branches = np.zeros(batch.num_reqs, np.int32)
        if step is not None:
            depths[step.node_rows], ancestors[step.node_rows] = step.depths, step.ancestors
            branches[[*step.trees]] = 1
            _place(batch, step, step.depths)
        for buffer, values in (
            (self._rows.ancestors, ancestors.view(np.int64)),
            (self._rows.depths, depths.astype(np.int32)),
            (self._rows.branches, branches),
        ):
            buffer[: len(values)].copy_(torch.from_numpy(values))

    def settle(
        self,
        batch: InputBatch,
        slot_mappings: Mapping[str, torch.Tensor],
        features: list[torch.Tensor],
    ) -> None:
        """After verification, accepted nodes become a list again; see `TreeLayers.settle`."""
        step = self.kept.step
        if step is not None:
            _place(batch, step, step.node_rows - step.root_rows)
            self._layers.settle(step, slot_mappings, features)

    def take_candidates(self, step: Step) -> None:
        """What trees of the step's drafted requests can be made of. Waits for the block."""
        requests = np.flatnonzero(step.plan.drafted)
        tokens, chances = self._likely.read(requests, step.plan.width)
        branching = np.array([self._branching.get(step.ids[each], False) for each in requests])
        room = room_for_long_drafts(self._step_tokens, len(self._branching), self._width)
        # A chain of a block has room in any case.
        budget = min(self.budget, max(room, self._width))
        step.candidates = Candidates(tokens, chances, branching, budget)

    def keep(self, step: Step, drafts: torch.Tensor) -> torch.Tensor:
        """Drafts as the scheduler is to have them: the block's [R, K] to the nodes' [R, n]."""
        chosen = np.zeros((len(drafts), max(self.budget, drafts.shape[1])), np.int64)
        trees = self.kept.keep(step)
        for request, tokens in zip(np.flatnonzero(step.plan.drafted), trees, strict=True):
            chosen[request, : len(tokens)] = tokens
        return torch.from_numpy(chosen).to(drafts)

    def fate(self, produced: Ints) -> Likeliest:
        """What became of the likeliest tokens; see `DraftTrees.fate`."""
        sampled = self._verifier.sampled
        assert sampled is not None
        return self.kept.fate(sampled.wait(), produced)


def _place(batch: InputBatch, step: VerifiedTrees, below: Ints) -> None:
    """Nodes stand so many tokens behind their bonus token, [N]."""
    nodes, roots, tokens = (
        torch.from_numpy(each).to(batch.positions.device)
        for each in (step.node_rows, step.root_rows, below)
    )
    batch.positions[nodes] = batch.positions[roots] + tokens


def attach_device_trees(runner: GPUModelRunner, asked: int | str) -> DeviceTrees | None:
    """Drafts are trees from now on, of up to so many nodes, unless the target forbids. Without a
    number they are not: what rows of trees cost was not measured on a GPU."""
    if not isinstance(asked, int):
        return None
    layers = target_layers(runner.vllm_config, runner.speculator.model.context.attentions)
    obstacle = why_chains(runner.vllm_config, layers, can_attend)
    if len(runner.sampler.logits_processors) > len(VLLMS_OWN_PROCESSORS):
        obstacle = "logits processors take the rows of a request to be consecutive tokens"
    if not runner.speculator.is_synchronous:
        obstacle = "under asynchronous scheduling the host does not know them in time"
    if obstacle:
        logger().warning("drafts are chains, not trees: %s.", obstacle)
        return None
    check_seams(DEVICE_TREES)
    rehearse_trees(runner.speculator.num_speculative_steps)
    return DeviceTrees(runner, layers, granted(asked, runner.num_speculative_steps))
