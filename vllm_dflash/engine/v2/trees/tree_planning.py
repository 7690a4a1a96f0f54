"""Plans draft trees in the scheduler: keeps room for their nodes in steps where trees pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.request import Request

from vllm_dflash.config.engine_options import tree_sizes
from vllm_dflash.engine.block_layout import draft_limits
from vllm_dflash.engine.v2.trees.tree_gain import TreeGain, rest_of_chains
from vllm_dflash.engine.v2.trees.tree_requests import may_branch
from vllm_dflash.planning import Ints
from vllm_dflash.planning.planner import Planner
from vllm_dflash.planning.step import Outcomes, Plan


class TreePlanner:
    """Draft lengths of requests whose drafts may be trees."""

    def __init__(
        self, num_nodes: int, planner: Planner, config: VllmConfig, max_scheduled: int
    ) -> None:
        """Allow trees of up to `num_nodes`; 0: all drafts are chains. `max_scheduled`: most rows
        that a step has."""
        self.num_nodes, self._planner = num_nodes, planner
        *self._cuts, _ = sizes = tree_sizes(num_nodes)
        self.gain = TreeGain(sizes)
        assert config.speculative_config is not None
        # vLLM 0.32 reserves room for each request's block, 0.33 none.
        self._kept_rows = config.speculative_config.max_num_new_slots_for_drafting
        self._most_rows = config.scheduler_config.max_num_batched_tokens, max_scheduled
        self._may_branch: dict[str, bool] = {}

    def lengths(
        self,
        plan: Plan,
        names: Sequence[str],
        requests: Mapping[str, Request],
        context_lens: Ints,
        ends: Ints,
    ) -> Ints:
        """Return how many drafts of each request the next step verifies, [R]: the plan's chains, or
        trees of the best of S sizes; of the largest one if lengths are not planned.

        Args:
            plan: plan of a step of R requests.
            names: ids of these requests.
            requests: unfinished requests by id.
            context_lens: tokens of context of each request, [R].
            ends: maximum length of each request, in tokens, [R].
        """
        if not (self.num_nodes and plan.runs_block):
            return plan.lengths
        of_trees = self._lengths_of_trees(plan.lengths, names, requests, context_lens, ends)
        if not self._planner.is_started:
            return of_trees[-1]
        best = self.gain.best(plan, self._planner.seconds(of_trees, context_lens))
        return plan.lengths if best is None else of_trees[best]

    def record_step(self, names: Sequence[str], outcomes: Outcomes, accepted: Ints) -> None:
        """Learn what became of R requests' drafts; `accepted`: how many were accepted, [R]."""
        if self.num_nodes:
            rest = rest_of_chains(outcomes, self._planner.ratios_of_blocks(names))
            self.gain.record_step(outcomes, accepted, rest)

    def _lengths_of_trees(
        self,
        chains: Ints,
        names: Sequence[str],
        requests: Mapping[str, Request],
        context_lens: Ints,
        ends: Ints,
    ) -> Ints:
        """Return the length of each request with trees of each size, [S, R]; `chains`: the length
        with chains, [R]. Where that is 0 it stays 0."""
        may = np.array([self._can_branch(name, requests) for name in names])
        budget, most = self._most_rows
        # vLLM leaves out requests that do not fit.
        most = min(budget - len(names) * self._kept_rows, most)
        room = min(self.num_nodes, most // len(names) - 1)
        limits = draft_limits(context_lens, ends, room, may)
        full = np.where((chains > 0) & may, np.maximum(limits, chains), chains)
        cut = [np.where(may, np.minimum(full, size), full) for size in self._cuts]
        return np.array([*cut, full])

    def _can_branch(self, name: str, requests: Mapping[str, Request]) -> bool:
        found = self._may_branch.get(name)
        if found is None:
            if len(self._may_branch) > 2 * len(requests):
                self._may_branch = {n: may for n, may in self._may_branch.items() if n in requests}
            request = requests.get(name)
            found = request is not None and may_branch(request.sampling_params)
            self._may_branch[name] = found
        return found
