"""Hook 12: where draft trees meet the V1 runner."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.engine.reporting.statistics import DraftStatistics
from vllm_dflash.engine.v1.branching import granted, target_layers, why_chains
from vllm_dflash.engine.v1.draft_trees import DraftTrees
from vllm_dflash.engine.v1.proposer import PlannedProposer
from vllm_dflash.engine.v1.tree_attention import TreeAttention, can_attend
from vllm_dflash.engine.v1.tree_sampling import TreeRejectionSampler
from vllm_dflash.planning.draft_tree import MOST_CANDIDATES
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.rehearsal import rehearse_trees
from vllm_dflash.planning.tree_acceptance import NODES_BY_DEFAULT, rows_are_cheap
from vllm_dflash.seams import V1_TREES, check_seams


def attach_trees(proposer: PlannedProposer) -> None:
    """From now on drafts may be trees, if they are to be, and chains where the target forbids."""
    asked, policy = proposer.options.draft_tree, proposer.lengths.policy
    room = proposer.num_speculative_tokens
    if isinstance(asked, int):
        budget = granted(asked, room)
    elif asked == "auto" and isinstance(policy, Planner) and rows_are_cheap(policy.costs.verify):
        budget = min(NODES_BY_DEFAULT, room)
    else:
        return
    runner = proposer.runner
    layers = target_layers(runner.vllm_config, proposer.model.context.attentions)
    obstacle = why_chains(runner.vllm_config, layers, can_attend)
    if obstacle:
        logger().warning("drafts are chains, not trees: %s.", obstacle)
        return
    check_seams(V1_TREES)
    trees, attention = DraftTrees(budget), TreeAttention(layers.values())
    runner._model_forward = functools.partial(_forward, runner, trees, attention)
    runner.rejection_sampler = TreeRejectionSampler(
        runner.sampler, runner.speculative_config, runner.device
    ).attach(trees, attention.settle)
    rehearse_trees(proposer.width)
    proposer.trees = trees
    if budget > proposer.width:
        proposer.lengths.statistics = DraftStatistics(budget)
    proposer.block.num_candidates = MOST_CANDIDATES


def _forward(
    runner: GPUModelRunner,
    trees: DraftTrees,
    attention: TreeAttention,
    input_ids: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """In the place of `GPUModelRunner._model_forward`, which is there to be overridden."""
    batch = runner.input_batch
    num_requests = batch.num_reqs
    step = trees.begin(
        batch.req_ids,
        batch.spec_token_ids[:num_requests],
        runner.query_start_loc.np[:num_requests],
        batch.num_computed_tokens_cpu[:num_requests],
        runner.requests,
    )
    attention.begin(step)
    if step is not None and positions is not None:
        positions = positions.clone()  # the slots of the buffer's positions stay
        rows, roots = torch.from_numpy(step.node_rows), torch.from_numpy(step.root_rows)
        positions[rows] = positions[roots] + torch.from_numpy(step.depths)
    return GPUModelRunner._model_forward(runner, input_ids, positions, **others)
