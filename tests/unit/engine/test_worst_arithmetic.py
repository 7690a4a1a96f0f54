"""Draws and decisions where exponentials, sums and NaN are as bad as on a GPU; in Triton's
interpreter (docs/engineering/gpu_arithmetic.md)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

from emulated.interpreter import worst_arithmetic
from support.decided_steps import World
from support.drawn_tokens import Case, Step
from vllm_dflash.engine.v2.confidence import find_argmax
from vllm_dflash.engine.v2.drawing_kernels import TILE, draw

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _worst(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.function is test_it_is_worse_arithmetic:
        yield
        return
    with worst_arithmetic():
        yield


def drawn_alone(logits: torch.Tensor) -> list[int]:
    """Return the token that is drawn greedily after each row, each a request of its own."""
    count = len(logits)
    step = Step(Case(count, 1, logits.shape[1]), 0)
    slots, ends = torch.arange(count), torch.arange(count + 1, dtype=torch.int32)
    step.temperatures[:] = 0.0
    drafts = torch.zeros(count, dtype=torch.int32)
    found = step.verifier().verify(logits, slots, drafts, slots + 9, ends, slots)
    tokens: list[int] = found.drawn.tolist()
    return tokens


@pytest.mark.parametrize("vocab_size", [9, 300, TILE + 9])
def test_rows_with_nan_draw_tokens_of_the_vocabulary(vocab_size: int) -> None:
    """Places after the vocabulary's end are -inf, to which NaN may lose."""
    logits = torch.zeros(4, vocab_size)
    logits[0] = torch.nan
    logits[1, -1] = torch.nan
    logits[2, : vocab_size // 2] = torch.nan
    logits[3, 5] = 1.0
    drawn = drawn_alone(logits)
    assert all(0 <= token < vocab_size for token in drawn), drawn
    assert drawn[3] == 5


@pytest.mark.parametrize("vocab_size", [300, 5000])
def test_confidence_is_a_probability(vocab_size: int) -> None:
    random = torch.Generator().manual_seed(0)
    logits = 9.0 * torch.randn(64, vocab_size, generator=random)
    logits[0] = 0.0
    logits[1] = -torch.inf
    logits[1, 7] = 3.0  # certain
    tokens, confidence = torch.zeros(64, 4, dtype=torch.int64), torch.zeros(64)
    shares = torch.zeros(64, 4)
    find_argmax(logits, tokens, confidence, shares)
    assert tokens[2:].tolist() == logits[2:].topk(4).indices.tolist()
    assert 0.0 < float(confidence.min()) <= float(confidence.max()) <= 1.0
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1), rtol=1e-5, atol=0.0)
    assert bool((shares.diff(dim=1) <= 0).all())


@pytest.mark.parametrize("seed", range(5))
def test_drafts_are_chosen_and_graded_as_by_hand(seed: int) -> None:
    world = World(7, 7, seed)
    for _ in range(4):
        world.step(5, has_block=bool(world.random.random() < 0.8), has_text=True)


def test_it_is_worse_arithmetic() -> None:
    """Otherwise the tests above would not test it: the noise has other bits."""
    slots, some = torch.zeros(64, dtype=torch.int64), torch.ones(1)
    logits = torch.randn(64, 9, generator=torch.Generator().manual_seed(1))
    tiny, one = np.float32(1 + 2**-23), np.float32(1 - 2**-23)
    """Their product is 1 if it is rounded, and 1 - 2^-46 if not."""

    def value() -> list[float]:
        seeds, positions = torch.tensor([7]), torch.arange(64)
        found = draw(logits, slots, None, positions, some, seeds, use_fp64=False)
        values: list[float] = found.values.flatten().tolist()
        return values

    def rest() -> float:
        builder, handle = interpreter.interpreter_builder, interpreter.TensorHandle
        factors = (handle(np.array([factor]), tl.float32) for factor in (tiny, one))
        product = builder.create_fmul(*factors)
        return float(
            builder.create_fsub(product, handle(np.ones(1, np.float32), tl.float32)).data[0]
        )

    better = value(), rest()
    with worst_arithmetic():
        worst = value(), rest()
        assert worst[0] == value()  # the same each time
    assert worst[0] != better[0] == pytest.approx(worst[0], abs=1e-5)
    assert (better[1], worst[1]) == (0.0, -(2.0**-46))
    assert (value(), rest()) == better
