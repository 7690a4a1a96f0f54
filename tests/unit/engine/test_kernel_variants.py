"""No batch needs a kernel that warm-up did not compile; in Triton's interpreter.

Engines are watched for this as well (`support.emulated_runs`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch

from support.decided_steps import World
from support.drawn_tokens import Case, Step
from support.kernel_variants import Variant, compiled
from vllm_dflash.engine.v2.confidence import find_argmax
from vllm_dflash.engine.v2.draft_noise import DraftNoise, noise_of
from vllm_dflash.engine.v2.draft_slots import Batch
from vllm_dflash.engine.v2.drawing_kernels import Verified
from vllm_dflash.engine.v2.text_look_up import TextLookUp
from vllm_dflash.engine.v2.trees.tree_slots import TreeSlots
from vllm_dflash.engine.v2.trees.tree_walk import walk

pytestmark = pytest.mark.v2
COUNTS = (2, 3, 15, 16, 17)


def verify(count: int) -> None:
    """Verify a batch, and a part of a larger one, whose rows begin anywhere."""
    for dtype in (torch.float32, torch.bfloat16):
        step = Step(Case(count, 3, 9), count, dtype)
        step.verify()
        step.verify(in_parts=True)
        at, of = (2, int(step.ends[2])) if count > 2 else (0, 0)
        row_slots, tokens, positions = (
            each[of:]
            for each in step.there(
                step.row_slots, step.tokens[step.rows], step.positions[step.rows]
            )
        )
        ends, slots = step.there(step.ends - of, step.slots)
        logits = step.logits[of:]
        step.verifier().verify(logits, row_slots, tokens, positions, ends[at:].clone(), slots[at:])


def decide(count: int) -> None:
    world = World(20, 7, seed=count)
    for has_block in (True, False):
        world.step(count, has_block=has_block, has_text=True)


def look_up(count: int) -> None:
    """Look up in texts of several lengths."""
    length = 48 - count % 16
    texts = torch.zeros(20, length, dtype=torch.int32)
    lens, newest = torch.full((20,), 5, dtype=torch.int32), torch.zeros(20, 1, dtype=torch.int64)
    batch = Batch.allocate(20, texts, lens, newest)
    batch.slots[:count], batch.num_sampled[:count] = torch.arange(count), 1
    TextLookUp(20, length, 7, torch.device("cpu")).look_up(batch)


def find(count: int) -> None:
    """Several drafts a request; K of its confidences are 28 bytes."""
    logits, confidence = torch.randn(7 * count, 5000), torch.zeros(7 * 20)[: 7 * count]
    find_argmax(logits, torch.zeros(7 * count, dtype=torch.int64), confidence)
    tokens, shares = torch.zeros(7 * count, 8, dtype=torch.int64), torch.zeros(7 * count, 8)
    find_argmax(logits, tokens, confidence, shares)
    slots, positions = torch.zeros(2, 7 * 20, dtype=torch.int64)
    requests = torch.ones(4), torch.zeros(4, dtype=torch.int64), None
    noise = DraftNoise(slots[: 7 * count], positions[: 7 * count], *requests, use_fp64=False)
    find_argmax(logits, tokens[:, 0].clone(), confidence, noise=noise)
    noise_of(tokens, noise)


def walk_along(count: int) -> None:
    """Walk in a part of a batch; no request has a tree."""
    start = count % 4
    trees = TreeSlots(40, 5, 5, torch.device("cpu"))
    slots = torch.arange(40)[start : start + count]
    ends = torch.arange(count + 1, dtype=torch.int32)
    counts = torch.zeros(2, 20, dtype=torch.int32)
    drawn, sampled = torch.zeros(count, dtype=torch.int64), torch.zeros(count, 6).long()
    verified = Verified(drawn, sampled, counts[0][:count].clone(), counts[1][:count].clone())
    walk(trees, slots, ends, verified, start)


@pytest.mark.parametrize("launch", [verify, decide, look_up, find, walk_along])
def test_all_batches_need_the_kernels_of_the_first(launch: Callable[[int], None]) -> None:
    with compiled() as variants:
        launch(1)
        of_one = frozenset(variants)
        assert of_one
        for count in COUNTS:
            launch(count)
    assert alike(variants) == alike(of_one), sorted(alike(variants) - alike(of_one))


def alike(variants: Collection[Variant]) -> set[Variant]:
    """Leave out the size of a batch's buffers, which an engine has once and for all."""
    return {tuple(one for one in each if not one.startswith("ROWS=")) for each in variants}
