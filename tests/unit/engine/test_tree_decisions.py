"""Draft trees as the device grows and walks them, beside plain Python; in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from support.chi_square import p_value
from support.trees_by_hand import Tree, calibrated, grown, path_of
from vllm_dflash.config.mode import TREE_CUTS
from vllm_dflash.engine.v2.draft_slots import HEAD, Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.grading import OUTCOME_COLUMNS, grade
from vllm_dflash.engine.v2.trees.tree_growth import Candidates, find_candidates, grow
from vllm_dflash.engine.v2.trees.tree_rows import line_up, place_nodes
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.v2.trees.tree_walk import walk
from vllm_dflash.planning.chances import BIAS_PRIOR_TOKENS
from vllm_dflash.planning.step import BLOCK, TEXT

pytestmark = [
    pytest.mark.usefixtures("runner"),
    pytest.mark.parametrize("runner", ["v2"], indirect=True),
]
CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**32 - 1)
SLOTS, VOCABULARY = 6, 9


class Grown:
    """Trees of some requests, by the device and by hand."""

    def __init__(self, seed: int, width: int, nodes: int, places: int, requests: int = 3) -> None:
        random = self.random = np.random.default_rng(seed)
        self.slots = DraftSlots(SLOTS, width, CPU)
        self.slots.rates[0] = torch.from_numpy(random.random(self.slots.rates[0].shape))
        self.trees = TreeSlots(SLOTS, nodes, CPU)
        self.trees.may_branch.fill_(1)
        self.of_request = random.permutation(SLOTS)[:requests]
        count = int(random.integers(2, 9))
        raw = np.sort(random.random((requests, width, count)) ** 3)[..., ::-1] + 1e-3
        share = random.uniform(0.5, 1.0, (requests, width, 1))
        probabilities = (share * raw / raw.sum(axis=-1, keepdims=True)).astype(np.float32)
        for request in range(requests):  # the drafter's logits were not finite somewhere
            if random.random() < 0.3:
                probabilities[request, random.integers(0, width) :] = 0.0
        tokens = random.integers(0, VOCABULARY, (requests, width, count))
        self.candidates = Candidates(torch.from_numpy(tokens), torch.from_numpy(probabilities))
        sure = torch.from_numpy(probabilities[..., 0].copy())
        self.chosen = Drafts(torch.from_numpy(tokens[..., 0].copy()), sure, torch.rand(sure.shape))
        self.slots.records[:, 0] = BLOCK
        self.slots.records[:, 2:4] = torch.from_numpy(20 * random.random((SLOTS, 2)))
        self.newest = torch.arange(20, 20 + SLOTS)
        self.sampled = np.ones(requests, np.int32)
        self.drafts = torch.full((requests + 1, places), -5)
        self.chances = torch.full((requests + 1, places), 5.0)
        rates = self.slots.rates[0].numpy()
        self.by_hand = [
            grown(tokens[each], calibrated(probabilities[each].tolist(), rates), nodes, last)
            for each, last in enumerate(self.newest[self.of_request].tolist())
        ]

    def bias_of(self, slot: int) -> float:
        (expected, accepted), prior = self.slots.everybody[0].tolist(), BIAS_PRIOR_TOKENS
        everybody = prior * (accepted + prior) / (expected + prior)
        expected, accepted = self.slots.records[slot, 2:4].tolist()
        return (accepted + everybody) / (expected + prior)

    def grow(self, *, has_block: bool = True) -> None:
        there = torch.from_numpy(self.of_request), torch.from_numpy(self.sampled)
        nothing = torch.zeros(0)
        batch = Batch(*there, nothing, nothing, nothing, self.newest[:, None])
        handed_over = self.drafts, self.chances
        grow(
            self.trees,
            self.slots,
            batch,
            self.chosen,
            self.candidates,
            handed_over,
            has_block=has_block,
        )


def check_grown(world: Grown, request: int, expected: Tree) -> None:
    slot, trees = world.of_request[request], world.trees
    nodes = trees.num_nodes
    assert trees.sizes[slot] == nodes
    assert trees.tokens[slot].tolist() == expected.tokens
    assert trees.parents[slot].tolist() == expected.parents
    assert trees.depths[slot].tolist() == expected.depths
    of_words = [each % 2**64 for each in trees.masks[slot].tolist()]
    assert of_words == expected.masks
    assert trees.likeliest[slot].item() % 2**64 == expected.likeliest
    assert world.drafts[request, :nodes].tolist() == expected.tokens
    assert (world.drafts[request, nodes:] == world.newest[slot]).all()
    survival = world.chances[request, :nodes].double().cumprod(0)
    corrected = np.minimum(world.bias_of(slot) * np.array(expected.survival), 1.0)
    np.testing.assert_allclose(survival, corrected, rtol=1e-4, atol=1e-12)
    assert (world.chances[request, nodes:] == 0.0).all()


@settings(max_examples=settings().max_examples // 3)
@given(SEEDS, st.sampled_from([1, 3, 7, 15]), st.sampled_from([1, 2, 8, 15, 64]), st.booleans())
def test_trees_are_grown_as_by_hand(seed: int, width: int, nodes: int, is_wide: bool) -> None:
    """Whatever is cut behind a node is not above it, and chances multiply to survival, corrected by
    each request's own bias and everybody's."""
    world = Grown(seed, width, nodes, max(width, nodes) + is_wide)
    world.slots.everybody[0] = torch.tensor([40.0, 40.0 * world.random.random()])
    world.grow()
    for request, expected in enumerate(world.by_hand):
        check_grown(world, request, expected)
        parents = np.array(expected.parents)
        assert (parents < np.arange(nodes)).all()
    assert (world.drafts[-1] == -5).all()
    untouched = np.setdiff1d(np.arange(SLOTS), world.of_request)
    assert not world.trees.tokens[untouched].any()


def test_chains_where_there_are_no_trees() -> None:
    """Requests that must not have one, that are in their prompt, and whose text is followed."""
    world = Grown(1, 3, 8, 8, requests=5)
    first, forbidden, in_prompt, with_text, last = range(5)
    world.trees.may_branch[world.of_request[forbidden]] = 0
    world.sampled[in_prompt] = 0
    world.slots.records[world.of_request[with_text], 0] = TEXT
    world.trees.sizes.fill_(8)
    world.grow()
    for request in (forbidden, in_prompt, with_text):
        assert world.trees.sizes[world.of_request[request]] == 0
        chain = world.chosen.tokens[request].tolist()
        newest = int(world.newest[world.of_request[request]])
        assert world.drafts[request].tolist() == chain + [newest] * 5
        assert (world.chances[request, :3] == world.chosen.chances[request]).all()
        assert (world.chances[request, 3:] == 0.0).all()
    for request in (first, last):
        check_grown(world, request, world.by_hand[request])
    world.grow(has_block=False)
    assert not world.trees.sizes[world.of_request].any()


def test_the_likeliest_chain_of_a_tree_is_graded_as_a_chain() -> None:
    """Of a request that had a tree with a chain of three, of which two came; beside one with a
    chain in more places than a block has drafts."""
    slots = DraftSlots(2, 4, CPU)
    slots.records[:, 0] = BLOCK
    survival = slots.records[:, HEAD + 4 : HEAD + 8]
    survival[:] = torch.tensor([0.9, 0.7, 0.5, 0.4])
    there, texts = torch.tensor([1, 0]), torch.zeros(2, 20, dtype=torch.int32)
    sampled, rejected = torch.tensor([4, 6]).int(), torch.tensor([7, 3]).int()
    lens, newest = torch.tensor([9, 9]).int(), torch.zeros(2, 1, dtype=torch.int64)
    batch = Batch(there, sampled, rejected, texts, lens, newest)
    outcomes = torch.full((2, OUTCOME_COLUMNS + 4), 99.0)
    grade(slots, batch, outcomes, torch.tensor([[3, 2, 3, 4, 4], [-1] * 5]).int())
    assert outcomes[:, [1, 6, 7]].tolist() == [[10, 3, 2], [8, 4, 4]]
    assert outcomes[:, 8:11].tolist() == [[3, 4, 4], [0, 0, 0]]
    torch.testing.assert_close(slots.records[1, 2:4], torch.tensor([0.9 + 0.7 + 0.5, 2.0]))
    torch.testing.assert_close(slots.records[0, 2:4], torch.tensor([2.5, 4.0]))


def test_candidates_are_the_likeliest_with_their_probabilities() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[1, 3] = logits[2] = torch.nan
    expected, ids = logits.softmax(-1).topk(8)
    confidence = expected[:, 0].nan_to_num(0.0)
    found = torch.full((6, 8), 5.0)
    columns = find_candidates(logits, confidence, found)
    fine = [0, 3, 4, 5]
    assert (columns[fine] == ids[fine]).all()
    torch.testing.assert_close(found[fine], expected[fine])
    assert (found[1:3] == 0.0).all()


@settings(max_examples=settings().max_examples // 2)
@given(SEEDS, st.sampled_from([1, 8, 33, 64]), st.integers(0, 3))
def test_trees_are_walked_as_by_hand(seed: int, nodes: int, start: int) -> None:
    """Of any size, cut anywhere, beside requests without one; part of a batch from `start` on."""
    world = Grown(seed, 7, nodes, nodes)
    world.grow()
    random, trees, count = world.random, world.trees, len(world.by_hand)
    rows = random.integers(0, nodes + 1, count)
    if random.random() < 0.3:
        trees.sizes[world.of_request[0]] = 0
    ends = np.cumsum([0, *(1 + rows)])
    drawn = random.integers(0, VOCABULARY, ends[-1])
    for request, tree in enumerate(world.by_hand):  # what comes is often what was drafted
        for node in range(rows[request]):
            if random.random() < 0.8:
                drawn[ends[request] + 1 + tree.parents[node]] = tree.tokens[node]
    sampled, num_sampled = torch.full((count, 1 + nodes), -1), torch.full((count,), 99)
    slots = torch.from_numpy(world.of_request)
    trees.slots = torch.zeros(1)
    trees.paths, trees.path_lens = torch.zeros(9, nodes, dtype=torch.int32), torch.zeros(9).int()
    trees.chains = torch.full((9, 2 + len(TREE_CUTS)), -1)
    there = torch.from_numpy(ends).int(), torch.from_numpy(drawn)
    walk(trees, slots, *there, sampled, num_sampled, start=start)
    for request, tree in enumerate(world.by_hand):
        row = start + request
        if rows[request] == 0 or trees.sizes[world.of_request[request]] == 0:
            assert num_sampled[request] == 99
            assert trees.path_lens[row] == 0
            assert (trees.chains[row] == -1).all()
            continue
        mine = drawn[ends[request] :]
        path = path_of(tree, mine, int(rows[request]))
        wrote = [int(mine[0]), *(int(mine[1 + node]) for node in path)]
        assert num_sampled[request] == len(wrote)
        assert sampled[request, : len(wrote)].tolist() == wrote
        assert trees.paths[row, : len(path)].tolist() == path
        assert trees.path_lens[row] == len(path)
        chain = [node for node, way in enumerate(tree.ways[: rows[request]]) if not any(way)]
        along = [a for a, b in zip(path, chain, strict=False) if a == b]
        # What is cut is another tree, which is walked by itself.
        cut = [path_of(tree, mine, min(int(rows[request]), size)) for size in TREE_CUTS]
        expected = [len(chain), len(along), *(1 + len(path) for path in cut)]
        assert trees.chains[row].tolist() == expected


def test_nodes_stand_by_their_depths_and_placeholders_in_a_row() -> None:
    """One that has a tree, one that has been cut, one with vLLM's placeholders behind its prompt,
    one in its prompt and one without a tree."""
    trees = TreeSlots(6, 4, CPU)
    tree, cut, placeholders, in_prompt, chain = 3, 2, 5, 1, 0
    trees.depths[:] = torch.tensor([1, 1, 1, 1])
    trees.depths[tree], trees.depths[cut] = torch.tensor([[1, 2, 2, 3], [1, 1, 2, 3]])
    trees.sizes[:] = 4
    trees.sizes[chain] = 0
    query = torch.tensor([0, 5, 8, 13, 16, 21])
    positions = torch.cat(
        [start + torch.arange(n) for start, n in [(10, 5), (20, 3), (30, 5), (40, 3), (50, 5)]]
    )
    before = positions.clone()
    batch: Any = SimpleNamespace(
        num_reqs=5,
        idx_mapping=torch.tensor([tree, cut, placeholders, in_prompt, chain]),
        query_start_loc=query,
        cu_num_logits=torch.tensor([0, 5, 8, 13, 14, 19]),
        positions=positions,
    )
    prefill_lens = torch.zeros(6, dtype=torch.int64)
    prefill_lens[[tree, cut, placeholders, in_prompt, chain]] = torch.tensor([10, 20, 31, 99, 5])
    place_nodes(trees, batch, prefill_lens)
    assert positions[:5].tolist() == [10, 11, 12, 12, 13]
    assert positions[5:8].tolist() == [20, 21, 21]
    assert (positions[8:] == before[8:]).all()
    assert trees.sizes.tolist() == [0, 4, 4, 4, 4, 0]
    line_up(trees, batch)
    assert (positions == before).all()


def test_what_is_walked_is_distributed_as_the_target_has_it() -> None:
    """At temperature 1, whatever the drafts are: pairs of tokens, drawn by vLLM's function."""
    vocabulary, requests = 4, 500
    random = torch.Generator().manual_seed(5)
    first = torch.randn(vocabulary, generator=random)
    second = torch.randn(vocabulary, vocabulary, generator=random)  # behind each first one
    tree = grown([[2, 0, 1], [3, 0, 2]], [[0.6, 0.3, 0.1], [0.5, 0.3, 0.2]], 6, last=0)
    trees = TreeSlots(requests, 6, CPU)
    trees.sizes.fill_(6)
    trees.tokens[:], trees.parents[:] = torch.tensor(tree.tokens), torch.tensor(tree.parents)
    behind = [first, *(second[token] for token in tree.tokens)]  # at depth 2 nobody looks
    starts, slots = 7 * torch.arange(requests + 1), torch.arange(requests)
    drawn = gumbel_sample(
        torch.stack(behind).repeat(requests, 1),
        slots.repeat_interleave(7),
        torch.ones(requests),
        100 + slots,
        torch.tensor([10, *(10 + depth for depth in tree.depths)]).repeat(requests),
        apply_temperature=False,
        is_drafting=False,
    )
    sampled, num_sampled = torch.zeros(requests, 7, dtype=torch.int64), torch.zeros(requests).int()
    walk(trees, slots, starts.int(), drawn, sampled, num_sampled)
    assert {1, 2, 3} == set(num_sampled.tolist())
    pairs, expected = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for tokens, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True):
        rest = second[tokens[0]].softmax(0)
        then = tokens[1] if count > 1 else int(rest.multinomial(1, generator=random))
        pairs[tokens[0], then] += 1
    for one in first.softmax(0).multinomial(requests, True, generator=random).tolist():
        expected[one, int(second[one].softmax(0).multinomial(1, generator=random))] += 1
    assert p_value(pairs, expected) > 0.01
    pairs[2, 3] += 120  # what a walk that likes its drafts would bring
    assert p_value(pairs, expected) < 0.01
