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
from vllm_dflash.planning import Bools, Ints
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

    def limits(
        self,
        chains: Ints,
        names: Sequence[str],
        requests: Mapping[str, Request],
        context_lens: Ints,
        ends: Ints,
    ) -> Ints:
        """Return the most drafts that each request of a step can use, [R].

        Args:
            chains: the same without trees, [R].
            names: ids of these requests.
            requests: unfinished requests by id.
            context_lens: tokens of context of each request, [R].
            ends: maximum length of each request, in tokens, [R].
        """
        if not self.num_nodes:
            return chains
        may = self._may_be_trees(names, requests)
        return np.maximum(draft_limits(context_lens, ends, self._room(len(names)), may), chains)

    def lengths(
        self,
        plan: Plan,
        limits: Ints,
        names: Sequence[str],
        requests: Mapping[str, Request],
        context_lens: Ints,
    ) -> Ints:
        """Return how many drafts of each request the next step verifies, [R]: the plan's chains, or
        trees of the best of S sizes; of the largest one if lengths are not planned.

        `plan`: plan of a step of R requests. For the other arguments see `limits`.
        """
        if not (self.num_nodes and plan.runs_block):
            return plan.lengths
        of_trees = self._lengths_of_trees(plan.lengths, limits, names, requests)
        if not self._planner.is_started:
            return of_trees[-1]
        best = self.gain.best(plan, self._planner.seconds(of_trees, context_lens))
        return plan.lengths if best is None else of_trees[best]

    def record_step(
        self, names: Sequence[str], outcomes: Outcomes, accepted: Ints, *, steps: int
    ) -> None:
        """Learn what became of R requests' drafts; `accepted`: how many were accepted, [R].
        `steps`: since the last call."""
        if self.num_nodes:
            rest = rest_of_chains(outcomes, self._planner.ratios_of_blocks(names))
            self.gain.record_step(outcomes, accepted, rest, steps=steps)

    def _lengths_of_trees(
        self, chains: Ints, limits: Ints, names: Sequence[str], requests: Mapping[str, Request]
    ) -> Ints:
        """Return the length of each request with trees of each size, [S, R]; `chains`: the length
        with chains, [R]. Where that is 0 it stays 0."""
        may = self._may_be_trees(names, requests)
        most = np.minimum(limits, np.maximum(chains, self._room(len(names))))
        full = np.where((chains > 0) & may, most, chains)
        cut = [np.where(may, np.minimum(full, size), full) for size in self._cuts]
        return np.array([*cut, full])

    def _room(self, num_requests: int) -> int:
        """Most nodes of each request's tree that fit into a step."""
        budget, most = self._most_rows
        # vLLM leaves out requests that do not fit.
        most = min(budget - num_requests * self._kept_rows, most)
        return min(self.num_nodes, most // num_requests - 1)

    def _may_be_trees(self, names: Sequence[str], requests: Mapping[str, Request]) -> Bools:
        return np.array([self._can_branch(name, requests) for name in names])

    def _can_branch(self, name: str, requests: Mapping[str, Request]) -> bool:
        found = self._may_branch.get(name)
        if found is None:
            if len(self._may_branch) > 2 * len(requests):
                self._may_branch = {n: may for n, may in self._may_branch.items() if n in requests}
            request = requests.get(name)
            found = request is not None and may_branch(request.sampling_params)
            self._may_branch[name] = found
        return found
