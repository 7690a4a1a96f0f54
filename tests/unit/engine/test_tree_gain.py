"""Whether a step is worth trees, and of which size, by its time and what trees brought before."""

from __future__ import annotations

import numpy as np
import pytest

from support.outcomes import outcomes_of
from support.trees_by_hand import Tree, grown, path_of
from vllm_dflash.config.engine_options import TREE_CUTS, tree_sizes
from vllm_dflash.engine.v2.trees.tree_gain import ASSUMED_RATIO, TreeGain
from vllm_dflash.planning.step import Outcomes, Plan

NODES = 31


def told(
    verified: list[int], tokens_if_truncated: list[list[int]], chains: list[int]
) -> tuple[Outcomes, np.ndarray, np.ndarray]:
    """Outcomes of trees: how many nodes were verified, how many drafts were accepted with 7, 15 or
    all nodes, and how many of the chains in them."""
    accepted = np.array(tokens_if_truncated)
    columns = 1 + accepted[:, [0, 1, 2]]
    columns[accepted[:, 2] < 0] = 0  # no tree
    outcomes = outcomes_of(verified, 7, accepted=chains)._replace(tokens_if_truncated=columns)
    return outcomes, np.abs(accepted[:, 2]), np.zeros(len(verified))


def test_without_news_all_sizes_are_hoped_for() -> None:
    gain = TreeGain(tree_sizes(NODES))
    assert gain.ratios.tolist() == [ASSUMED_RATIO] * 3
    assert TreeGain(tree_sizes(0)).ratios.tolist() == [ASSUMED_RATIO]


def test_what_trees_brought_counts() -> None:
    """For requests that had trees of as many nodes, relative to a whole chain, however much of it
    was verified."""
    gain = TreeGain(tree_sizes(NODES))
    for _ in range(300):
        outcomes, accepted, rest = told(
            [31, 15, 7, 31], [[3, 4, 6], [3, 4, 4], [3, 3, 3], [-9] * 3], [4, 2, 3, 9]
        )
        gain.record_step(outcomes, accepted, rest + np.array([0, 2, 1, 9]))
    assert gain.ratios.tolist() == pytest.approx([3 / 4, 1.0, 6 / 4], abs=0.04)
    for _ in range(600):
        outcomes, accepted, rest = told([31], [[6, 6, 6]], [6])
        gain.record_step(outcomes, accepted, rest)
    assert gain.ratios.tolist() == pytest.approx([1.0] * 3, abs=0.03)


@pytest.mark.parametrize("steps", [1, 30], ids=["every step", "every 30th step"])
def test_sizes_that_did_not_pay_are_tried_again_one_day(steps: int) -> None:
    """After as many steps, however seldom they are learned from."""
    gain = TreeGain(tree_sizes(NODES))
    for _ in range(100):
        gain.record_step(*told([31], [[4, 4, 4]], [4]))
    before = gain.ratios
    for _ in range(3000 // steps):
        gain.record_step(*told([15], [[4, 4, 4]], [4]), steps=steps)
    assert (before < 1.05).all()
    assert (gain.ratios[:2] < 1.05).all()
    assert gain.ratios[2] > 1.2


@pytest.mark.parametrize("verified", tree_sizes(NODES))
@pytest.mark.parametrize("chance", [0.6, 0.9])
def test_what_is_learned_is_the_survival_of_the_nodes(chance: float, verified: int) -> None:
    """The expected drafts of a tree's first nodes are the sum of their survival, and likewise for a
    chain. This also holds if steps verify fewer nodes, and so cut the chain too early."""
    width, random = 15, np.random.default_rng(3)
    chances = [[chance, 0.6 * (1 - chance), 0.3 * (1 - chance)]] * width
    tokens = [[0, 1, 2]] * width
    tree = grown(tokens, chances, NODES, 9)
    chain = np.cumprod(np.full(width, chance))
    gain = TreeGain(tree_sizes(NODES))
    ratios = []
    for _ in range(4000):
        gain.record_step(*became(tree, verified, chance, random))
        ratios.append(gain.ratios)
    learned = np.mean(ratios[1000:], axis=0)
    sizes = [size for size in tree_sizes(NODES) if size <= verified]
    expected = [sum(tree.survival[:size]) / chain.sum() for size in sizes]
    assert learned[: len(sizes)].tolist() == pytest.approx(expected, rel=0.05)
    assert (gain.ratios[len(sizes) :] == ASSUMED_RATIO).all()


def became(
    tree: Tree, verified: int, chance: float, random: np.random.Generator
) -> tuple[Outcomes, np.ndarray, np.ndarray]:
    """One step. Tokens by depth are drawn with the chances in the tree."""
    odds = [chance, 0.6 * (1 - chance), 0.3 * (1 - chance), 0.1 * (1 - chance)]
    by_depth = random.choice(4, p=odds, size=99).tolist()
    drawn = [by_depth[0], *(by_depth[depth] for depth in tree.depths)]
    lengths = [len(path_of(tree, drawn, min(verified, size))) for size in (*TREE_CUTS, verified)]
    firsts = [node for node, way in enumerate(tree.ways[:verified]) if not any(way)]
    accepted = next((n for n in range(len(firsts)) if by_depth[n]), len(firsts))
    outcomes = outcomes_of([verified], 15, accepted=[accepted])
    outcomes = outcomes._replace(tokens_if_truncated=1 + np.array([lengths[:3]]))
    rest = sum(chance ** np.arange(1, 16 - len(firsts))) * (accepted == len(firsts))
    return outcomes, np.array(lengths[3:]), np.array([rest])


@pytest.mark.parametrize("seed", range(20))
def test_the_size_that_brings_most_a_second_is_chosen(seed: int) -> None:
    random, gain = np.random.default_rng(seed), TreeGain(tree_sizes(NODES))
    gain._chains, gain._trees = random.uniform(0, 2000, (2, 3))
    count, accepted = int(random.integers(1, 9)), float(random.uniform(0, 4))
    seconds, rate = random.uniform(0.01, 0.03, 3), float(random.uniform(0, 600)) * 8
    of_texts = float(random.uniform(0, 4))  # worth of drafts that remain chains
    best, expected = rate, None
    for size in range(3):
        brings = (gain._trees[size] + 62.5) / (gain._chains[size] + 50.0) * accepted
        mean = (1 + brings) * np.exp(of_texts / count)  # tokens of each request in the step
        if count * mean / seconds[size] > best:
            best, expected = count * mean / seconds[size], size
    promise = count * float(np.log(1 + accepted))
    plan = Plan.without_block(count, rate=rate, of_blocks=promise, of_texts=of_texts)
    assert gain.best(plan, seconds) == expected
