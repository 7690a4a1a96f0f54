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
from vllm_dflash.engine.v2.draft_noise import DraftNoise, noise_of

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


@pytest.mark.parametrize("vocab_size", [9, 300, 1033])
def test_rows_with_nan_draw_tokens_of_the_vocabulary(vocab_size: int) -> None:
    """Places after the vocabulary's end are -inf, to which NaN may lose."""
    logits = torch.zeros(4, vocab_size)
    logits[0] = torch.nan
    logits[1, -1] = torch.nan
    logits[2, : vocab_size // 2] = torch.nan
    logits[3, 5] = 1.0
    step = Step(Case(4, 1, vocab_size), 0)
    step.temperatures[:] = 0.0
    slots, ends = torch.arange(4), torch.arange(5, dtype=torch.int32)
    found = step.verifier().verify(logits, slots, ends[:4], slots + 9, ends, slots)
    for tokens in (found.drawn, found.sampled[:, 0]):
        assert all(0 <= token < vocab_size for token in tokens.tolist()), tokens
        assert tokens[3] == 5


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
    slots, candidates = torch.zeros(64, dtype=torch.int64), torch.arange(9).expand(64, 9)
    requests = torch.ones(1), torch.tensor([7]), None
    noise = DraftNoise(slots, torch.arange(64), *requests, use_fp64=False)
    tiny, one = np.float32(1 + 2**-23), np.float32(1 - 2**-23)
    """Their product is 1 if it is rounded, and 1 - 2^-46 if not."""

    def value() -> list[float]:
        values: list[float] = noise_of(candidates.contiguous(), noise).flatten().tolist()
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
