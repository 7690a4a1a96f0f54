"""How likely the nodes of draft trees are to be accepted, and what a tree brings over its chain.

The likeliest token of a place is calibrated as in a chain (`chances`), the others by their
rank and the drafter's confidence. All of a place's candidates are known to be right or wrong once
the target has written a token there, verified or not.
"""

from __future__ import annotations

import numpy as np

from vllm_dflash.planning import Floats, Ints, Records
from vllm_dflash.planning.chances import HALF_LIFE_TOKENS, Chances, count_outcome, update_rates
from vllm_dflash.planning.compiled import compiled
from vllm_dflash.planning.costs import StepCosts, many_decoding_seconds
from vllm_dflash.planning.curves import Curve
from vllm_dflash.planning.draft_tree import MOST_CANDIDATES, grow
from vllm_dflash.planning.step import Step

NODES_BY_DEFAULT = 32
"""Of a tree that nobody asked a size of."""
CHEAP_ROW = 0.01
"""Share of a step of one row that another row may take for trees to be thought of at all: siblings
are rows that are mostly rejected. On a GPU it is about a thousandth, on two cores of a CPU 0.07."""
GAIN_RATE = 0.1
UNKNOWN = -1


def rows_are_cheap(verify: Curve) -> bool:
    """Whether trees may pay, by the target's seconds against rows."""
    one = verify.at_one(1)
    return verify.at_one(1 + NODES_BY_DEFAULT) - one <= CHEAP_ROW * NODES_BY_DEFAULT * one


@compiled
def learn_ranks(
    ranks: Chances,
    confidence: Floats,
    rows: Ints,
    verified: Ints,
    accepted: Ints,
    missed: Ints,
) -> None:
    """What the target wrote where a chain of likeliest tokens was verified.

    Args:
        ranks: chances by rank in the place of positions.
        confidence: of each place's candidates, likeliest first, by row, [rows, K, C].
        rows: of the requests, [R].
        verified: likeliest tokens of each that were verified, [R].
        accepted: of those, [R].
        missed: rank of what the target wrote in the place of the first that was not accepted; C or
            more if it is none of them or there was none; `UNKNOWN` where nobody looked, [R].
    """
    seen, came = ranks.seen, ranks.accepted
    num_tried = 0
    for request in range(len(rows)):
        if missed[request] != UNKNOWN:
            num_tried += min(accepted[request] + 1, verified[request])
    if not num_tried:
        return
    fade = 0.5 ** (num_tried / HALF_LIFE_TOKENS)
    seen *= fade
    came *= fade
    for request in range(len(rows)):
        if missed[request] == UNKNOWN:
            continue
        for place in range(min(accepted[request] + 1, verified[request])):
            right = 0 if place < accepted[request] else missed[request]
            for rank in range(1, confidence.shape[2]):
                chance = confidence[rows[request], place, rank]
                if chance <= 0.0:
                    continue
                count_outcome(seen[rank], came[rank], chance, rank == right)
    update_rates(ranks.rates, seen, came)


@compiled
def best_rate(records: Records, num_requests: int, survival: Floats, drafting: float) -> float:
    """Tokens per second of the best step that verifies any number of drafts of this survival.

    Args:
        records: costs, [1].
        num_requests: R.
        survival: of all drafts that could be verified; 0 where there is none.
        drafting: seconds of making them.
    """
    rows = num_requests + np.arange(len(survival) + 1).astype(np.float64)
    seconds = many_decoding_seconds(records[0], num_requests, rows, 0.0, 0.0)
    tokens, best = float(num_requests), num_requests / (seconds[0] + drafting)
    for number, chance in enumerate(-np.sort(-survival)):
        tokens += chance
        best = max(best, tokens / (seconds[number + 1] + drafting))
    return best


@compiled
def chain_chances(chances: Floats) -> tuple[Floats, Ints]:
    """Along the likeliest tokens of each block: all candidates of each place, likeliest first.

    Args:
        chances: of `Candidates`, [D, w, P, C].

    Returns:
        Their chances and which candidates they are, [D, w, C] each.
    """
    num_blocks, width, num_before, num_candidates = chances.shape
    found = np.empty((num_blocks, width, num_candidates))
    order = np.empty((num_blocks, width, num_candidates), np.int64)
    for block in range(num_blocks):
        before = 0
        for place in range(width):
            of_place = chances[block, place, before]
            best = np.argsort(-of_place, kind="mergesort")
            order[block, place] = best
            found[block, place] = of_place[best]
            if num_before > 1:
                before = best[0]
    return found, order


class TreeAcceptance:
    """What is known of candidates that are not the likeliest of their place."""

    def __init__(self, max_draft: int, num_rows: int) -> None:
        """For blocks of up to `max_draft` places (K), and tables of so many requests."""
        self.ranks = Chances.of(MOST_CANDIDATES, 0)
        """By rank in the place of positions."""
        self._confidence = np.zeros((num_rows, max_draft, MOST_CANDIDATES))
        """Of the last blocks' candidates."""
        self.gain = 1.0
        """Rate of steps with trees against the same with chains, lately."""

    def grow(
        self, step: Step, rows: Ints, blocks: Chances, costs: StepCosts, chains: Floats
    ) -> tuple[Floats, Ints]:
        """Write the `trees` of a step, and compare them with its chains.

        Args:
            step: with `candidates` of its D drafted requests.
            rows: of those in the tables, [D].
            blocks: what is known of likeliest tokens.
            costs: by which trees are compared.
            chains: survival of likeliest tokens, [D, w].

        Returns:
            Survival of the nodes, [D, n], and how many each of the R requests has, or drafts, [R].
        """
        candidates, drafted = step.candidates, step.plan.drafted
        assert candidates is not None
        found = chain_chances(candidates.chances)[0][:, :, :MOST_CANDIDATES]
        width, count = found.shape[1:]
        self._confidence[rows] = 0.0
        self._confidence[rows, :width, :count] = found
        step.trees = grow(
            candidates,
            step.limits[drafted],
            blocks.bias_of(rows),
            blocks.rates,
            self.ranks.rates,
        )
        self._compare(costs, step, chains)
        limits = step.limits.copy()
        limits[drafted] = step.trees.lengths
        return step.trees.survival, limits

    def learn(self, rows: Ints, verified: Ints, accepted: Ints, missed: Ints) -> None:
        """What came of the last ones: see `learn_ranks`."""
        learn_ranks(self.ranks, self._confidence, rows, verified, accepted, missed)

    def _compare(self, costs: StepCosts, step: Step, curves: Floats) -> None:
        """What the trees of a step can bring against chains of survival `curves`, [D, w]."""
        assert step.trees is not None
        drafted = step.plan.drafted
        rows = float(drafted.sum() * (1 + step.plan.width))
        drafting = costs.block(rows, float(step.context_lens[drafted].sum()))
        places = np.arange(curves.shape[1]) < step.limits[drafted, None]
        trees, chains = (
            best_rate(costs.records, step.num_requests, survival, drafting)
            for survival in (step.trees.survival.ravel(), (curves * places).ravel())
        )
        self.gain += GAIN_RATE * (trees / chains - self.gain)
