"""Draft trees in an engine: connects them to vLLM's step and to ours.

    place     give the nodes of verified drafts their positions               (tree_rows.py)
    attend    let rows see the context and their ancestors                    (tree_attention.py)
    walk      accept the nodes that match the tokens drawn after each row     (tree_walk.py)
    settle    move K/V and features of accepted nodes to consecutive rows     (tree_move.py)
    grow      make the next trees from the drafter's most likely candidates   (tree_growth.py)

The host never waits for the device, and decides only how many drafts are verified. Requests that
need chains get them, in the same batch as others' trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dflash.engine.agreement import agreed_by_all
from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.v2.confidence import find_argmax
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.trees.tree_attention import attend_to_trees, attention_unsupported_reason
from vllm_dflash.engine.v2.trees.tree_growth import MOST_CANDIDATES, Candidates, grow
from vllm_dflash.engine.v2.trees.tree_move import (
    CacheMover,
    cached_layers,
    move_rows,
    move_unsupported_reason,
)
from vllm_dflash.engine.v2.trees.tree_requests import may_branch, trees_unsupported_reason
from vllm_dflash.engine.v2.trees.tree_rows import place_nodes
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.v2.trees.tree_walk import TreeVerifier


class DraftTrees:
    """Draft trees of one engine; all drafts are chains unless `attach` has succeeded."""

    is_attached = False

    def __init__(
        self, num_slots: int, width: int, max_drafts: int, num_nodes: int, device: torch.device
    ) -> None:
        """Allocate S request slots, for blocks of K drafts, up to W drafts, and trees of N
        nodes."""
        self.slots = TreeSlots(num_slots, width, num_nodes, device)
        of_blocks = num_slots, width, MOST_CANDIDATES
        self.candidates = Candidates(
            torch.zeros(of_blocks, dtype=torch.int64, device=device),
            torch.zeros(of_blocks, device=device),
        )
        self.tokens = torch.zeros(num_slots, max_drafts, dtype=torch.int64, device=device)
        """Drafts for vLLM, [max R, W]."""
        self.chances = torch.zeros(num_slots, max_drafts, device=device)
        """Chance of each draft for vLLM's trimming; their product is survival, [max R, W]."""
        self._newcomers: list[tuple[str, bool]] = []
        """New requests, and whether their drafts may be trees."""

    def attach(self, runner: GPUModelRunner, drafters: set[str]) -> None:
        """Attach trees to the runner (hook "draft trees"), or log why drafts stay chains.

        Call this before graphs are captured. `drafters`: names of the drafter's layers.
        """
        config = runner.vllm_config
        layers = {
            name: layer
            for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items()
            if name not in drafters
        }
        why = trees_unsupported_reason(config) or attention_unsupported_reason(layers)
        cached = [] if why else cached_layers(runner, layers)
        why = why or move_unsupported_reason(cached)
        if not agreed_by_all(why is None):
            why = why or "it does not hold on another rank"
            logger().warning("drafts are chains, not trees: %s.", why)
            return
        # Graphs serve all batches, since a chain is a tree to these kernels.
        attend_to_trees(layers.values(), self.slots)
        self._mover = CacheMover(cached)
        self._states = runner.req_states
        runner.prepare_attn = functools.partial(self._prepare_attn, runner)
        verifier = runner.rejection_sampler = TreeVerifier.instead_of(runner.rejection_sampler)
        verifier.trees = self.slots
        self.is_attached = True
        logger().info("drafts are trees of up to %d nodes", self.slots.num_nodes)

    # --- every step -------------------------------------------------------------------------

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        """Note the new requests of a step that is about to run."""
        self._newcomers = [
            (new.req_id, self.is_attached and may_branch(new.sampling_params))
            for new in scheduler_output.scheduled_new_reqs
        ]

    def _prepare_attn(self, runner: GPUModelRunner, batch: InputBatch) -> Any:
        """Replaces the runner's method: runs it, then writes the nodes' positions. K/V slots stay
        those of consecutive tokens."""
        found = GPUModelRunner.prepare_attn(runner, batch)
        if self._newcomers:
            slots = [self._states.req_id_to_index[name] for name, _ in self._newcomers]
            may = np.array([may for _, may in self._newcomers], np.int32)
            self.slots.forget(
                async_tensor_h2d(np.array(slots, np.int64), device=batch.positions.device),
                async_tensor_h2d(may, device=batch.positions.device),
            )
        self.slots.begin(batch.idx_mapping)
        if batch.num_draft_tokens:
            place_nodes(self.slots, batch, self._states.prefill_len.gpu)
        return found

    def settle(self, batch: InputBatch, context: torch.Tensor) -> None:
        """Make accepted nodes consecutive tokens, after the target has run and the walk is done.

        `context`: fused features of the batch's tokens, [T, H].
        """
        if not (self.is_attached and batch.num_draft_tokens):
            return
        self._mover.move(self.slots, batch)
        move_rows(context, self.slots, batch.query_start_loc)
        place_nodes(self.slots, batch, None)

    def find_candidates(
        self,
        logits: torch.Tensor,
        confidence: torch.Tensor,
        target_ids: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Store the candidates of R blocks, and return each row's first, [R * K]. Captured.

        Args:
            logits: logits over the drafter's vocabulary, [R * K, V].
            confidence: out: probability of the most likely candidate, [R * K].
            target_ids: maps columns of the logits to token ids.
        """
        tokens, probabilities = (each.flatten(0, 1)[: len(logits)] for each in self.candidates)
        columns = torch.empty_like(tokens)
        find_argmax(logits, columns, confidence, probabilities)
        tokens.copy_(target_ids(columns.flatten()).view_as(columns))
        return tokens[:, 0]

    def grow(self, slots: DraftSlots, batch: Batch, chosen: Drafts, *, has_block: bool) -> None:
        """Make trees of the chosen drafts, if they may be trees; writes `tokens` and `chances`."""
        draft_output = self.tokens, self.chances
        grow(self.slots, slots, batch, chosen, self.candidates, draft_output, has_block=has_block)
