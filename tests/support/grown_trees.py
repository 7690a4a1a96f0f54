"""Draft trees of random blocks: grown, placed and walked on a device, beside plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from support.kernel_oracle import Oracle
from support.trees_by_hand import Tree, chances_of, grown, path_of
from vllm_dflash.config.engine_options import TREE_CUTS
from vllm_dflash.engine.v2.draft_slots import Batch, Drafts, DraftSlots
from vllm_dflash.engine.v2.drawing_kernels import Verified
from vllm_dflash.engine.v2.trees.tree_growth import Candidates, grow
from vllm_dflash.engine.v2.trees.tree_rows import place_nodes
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.v2.trees.tree_walk import walk
from vllm_dflash.planning.acceptance import PRIOR_TOKENS
from vllm_dflash.planning.step import BLOCK

SLOTS, VOCABULARY = 10, 9


class Grown:
    """Trees of some requests, by the device and by hand."""

    def __init__(
        self,
        seed: int,
        width: int,
        nodes: int,
        draft_slots: int,
        requests: int = 3,
        where: torch.device | str = "cpu",
    ) -> None:
        random = self.random = np.random.default_rng(seed)
        device = self.device = torch.device(where)
        num_slots = 2 * requests if requests > SLOTS else SLOTS
        self.slots = DraftSlots(num_slots, width, device)
        self.trees = TreeSlots(num_slots, width, nodes, device)
        self.trees.may_branch.fill_(1)
        self.of_request = random.permutation(num_slots)[:requests]
        count = int(random.integers(2, 9))
        raw = np.sort(random.random((requests, width, count)) ** 3)[..., ::-1] + 1e-3
        share = random.uniform(0.5, 1.0, (requests, width, 1))
        probabilities = (share * raw / raw.sum(axis=-1, keepdims=True)).astype(np.float32)
        for request in range(requests):  # the drafter's logits were not finite somewhere
            if random.random() < 0.3:
                probabilities[request, random.integers(0, width) :] = 0.0
        tokens = random.integers(0, VOCABULARY, (requests, width, count))
        self.candidates = Candidates(*self.there(tokens, probabilities))
        chain, confidence = self.there(tokens[..., 0].copy(), probabilities[..., 0].copy())
        self.chosen = Drafts(chain, confidence, torch.rand(confidence.shape, device=device))
        self.slots.records[:, 0] = BLOCK
        self.slots.records[:, 2:4] = torch.from_numpy(20 * random.random((num_slots, 2)))
        self.newest = torch.arange(20, 20 + num_slots, device=device)
        self.sampled = np.ones(requests, np.int32)
        self.drafts = torch.full((requests + 1, draft_slots), -5, device=device)
        self.chances = torch.full((requests + 1, draft_slots), 5.0, device=device)
        self.slots.overall[0] = torch.tensor([40.0, 40.0 * random.random()])
        self.by_hand = [
            grown(tokens[each], chances_of(probabilities[each].tolist()), nodes, last)
            for each, last in enumerate(self.newest[self.of_request].tolist())
        ]

    def there(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Return the arrays on the device."""
        return [torch.from_numpy(each).to(self.device) for each in arrays]

    def ratio_of(self, slot: int) -> float:
        (expected, accepted), prior = self.slots.overall[0].tolist(), PRIOR_TOKENS
        overall = prior * (accepted + prior) / (expected + prior)
        expected, accepted = self.slots.records[slot, 2:4].tolist()
        return (accepted + overall) / (expected + prior)

    def grow(self, *, has_block: bool = True) -> None:
        """Grow the trees; two rows behind the batch have no request."""
        there, sampled = self.there(
            np.append(self.of_request, [-1, -1]), np.append(self.sampled, np.zeros(2, np.int32))
        )
        nothing = torch.zeros(0)
        batch = Batch(there, sampled, nothing, nothing, self.newest[:, None])
        drafts = self.drafts, self.chances
        grow(
            self.trees,
            self.slots,
            batch,
            self.chosen,
            self.candidates,
            drafts,
            has_block=has_block,
        )

    def check(self, request: int, expected: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise AssertionError if a tree differs. Return survival, found and expected."""
        slot, trees = self.of_request[request], self.trees
        nodes = trees.num_nodes
        assert trees.sizes[slot] == nodes
        assert trees.tokens[slot].tolist() == expected.tokens
        assert trees.parents[slot].tolist() == expected.parents
        assert trees.depths[slot].tolist() == expected.depths
        of_words = [each % 2**64 for each in trees.masks[slot].tolist()]
        assert of_words == expected.masks
        assert trees.argmax_nodes[slot].item() % 2**64 == expected.most_likely
        assert self.drafts[request, :nodes].tolist() == expected.tokens
        assert (self.drafts[request, nodes:] == self.newest[slot]).all()
        assert (self.chances[request, nodes:] == 0.0).all()
        survival = self.chances[request, :nodes].double().cpu().cumprod(0)
        corrected = np.minimum(self.ratio_of(slot) * np.array(expected.survival), 1.0)
        np.testing.assert_allclose(survival, corrected, rtol=1e-4, atol=1e-12)
        return survival, torch.from_numpy(corrected)

    def walk(self, start: int = 0) -> None:
        """Draw a token after each row, and walk; requests are in a batch from `start` on."""
        random, trees, count = self.random, self.trees, len(self.by_hand)
        nodes, device = trees.num_nodes, self.device
        rows = random.integers(0, nodes + 1, count)
        if random.random() < 0.3:
            trees.sizes[self.of_request[0]] = 0
        ends = np.cumsum([0, *(1 + rows)])
        drawn = random.integers(0, VOCABULARY, ends[-1])
        for request, tree in enumerate(self.by_hand):  # drawn tokens are often those drafted
            for node in range(rows[request]):
                if random.random() < 0.8:
                    drawn[ends[request] + 1 + tree.parents[node]] = tree.tokens[node]
        sampled = torch.full((count, 1 + nodes), -1, device=device)
        num_sampled, num_rejected = torch.full((2, count), 99, device=device)
        slots, first, tokens = self.there(self.of_request, ends.astype(np.int32), drawn)
        verified = Verified(tokens, sampled, num_sampled, num_rejected)
        walk(trees, slots, first, verified, start)
        for request, tree in enumerate(self.by_hand):
            row = start + request
            if rows[request] == 0 or trees.sizes[self.of_request[request]] == 0:
                assert num_sampled[request] == num_rejected[request] == 99
                assert trees.path_lens[row] == 0
                assert (trees.chains[row] == -1).all()
                continue
            mine = drawn[ends[request] :]
            path = path_of(tree, mine, int(rows[request]))
            wrote = [int(mine[0]), *(int(mine[1 + node]) for node in path)]
            assert num_sampled[request] == len(wrote)
            assert num_rejected[request] == rows[request] - len(path)
            assert sampled[request, : len(wrote)].tolist() == wrote
            assert trees.paths[row, : len(path)].tolist() == path
            assert trees.path_lens[row] == len(path)
            chain = [node for node, way in enumerate(tree.ways[: rows[request]]) if not any(way)]
            along = [a for a, b in zip(path, chain, strict=False) if a == b]
            # A cut tree is another tree, which is walked by itself.
            cut = [path_of(tree, mine, min(int(rows[request]), size)) for size in TREE_CUTS]
            expected = [len(chain), len(along), *(1 + len(path) for path in cut)]
            assert trees.chains[row].tolist() == expected

    def place(self) -> None:
        """Put nodes at positions by their depths, then in a row again, and compare with loops. Some
        requests are in their prompts."""
        random, trees, slots = self.random, self.trees, self.of_request
        nodes, count = trees.num_nodes, len(self.by_hand)
        rows = 1 + random.integers(0, nodes + 1, count)
        ends, contexts = np.cumsum([0, *rows]), random.integers(5, 5_000, count)
        before = np.concatenate(
            [context + np.arange(n) for context, n in zip(contexts, rows, strict=True)]
        )
        prefill = np.zeros(len(trees.sizes), np.int64)
        prefill[slots] = contexts - 2 + 4 * (random.random(count) < 0.3)
        there, query, logits, positions, prefill_lens = self.there(
            slots, *[ends.astype(np.int32)] * 2, before.copy(), prefill
        )
        batch: Any = SimpleNamespace(
            num_reqs=count,
            idx_mapping=there,
            query_start_loc=query,
            cu_num_logits=logits,
            positions=positions,
        )
        sizes = trees.sizes.clone()
        place_nodes(trees, batch, prefill_lens)
        placed = before.copy()
        for request, (slot, tree) in enumerate(zip(slots, self.by_hand, strict=True)):
            drafts = rows[request] - 1
            if sizes[slot] == 0 or not drafts:
                continue
            assert bool(trees.sizes[slot]) == (contexts[request] >= prefill[slot])
            if trees.sizes[slot]:
                depths = contexts[request] + np.array(tree.depths[:drafts])
                placed[ends[request] + 1 :][:drafts] = depths
        assert positions.tolist() == placed.tolist()
        place_nodes(trees, batch, None)
        assert positions.tolist() == before.tolist()


@dataclass
class Case:
    """Requests with blocks of K drafts and trees of N nodes."""

    num_requests: int
    width: int
    nodes: int


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return survival of all nodes, found and expected; all else is asserted."""
    world = Grown(
        case.nodes, case.width, case.nodes, max(case.width, case.nodes), case.num_requests, device
    )
    world.grow()
    checked = [world.check(request, tree) for request, tree in enumerate(world.by_hand)]
    world.place()
    world.walk(start=1)
    found, expected = zip(*checked, strict=True)
    return torch.cat(found), torch.cat(expected)


TREES = Oracle(
    "draft trees",
    {
        "K = 7, N = 15": Case(3, 7, 15),
        "K = 15, N = 64": Case(33, 15, 64),
        "K = 7, N = 31": Case(64, 7, 31),
        "K = 15, N = 5": Case(5, 15, 5),
    },
    compare,
    dtypes=(torch.float32,),
    interpreted=("K = 7, N = 15", "K = 15, N = 5"),
)
