"""The confidence of the drafter in each token, computed on the device; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.judged_logits import INF, NAN, check_candidates, compare_confidence
from vllm_dflash.engine.v2.confidence import TILE

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def check(logits: torch.Tensor, num_rows: int | None = None) -> None:
    torch.testing.assert_close(*compare_confidence(logits, num_rows), rtol=2e-5, atol=2e-5)


@given(
    rows=st.lists(
        st.lists(
            st.sampled_from([0.0, 1.0, -3.0, 30.0, 88.0, -1e30, INF, -INF, NAN]),
            min_size=5,
            max_size=5,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_rows_of_anything(rows: list[list[float]]) -> None:
    """Includes ties, rows of -inf only, and numbers that are too large for exp."""
    check(torch.tensor(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 9, TILE, TILE + 1, 3 * TILE + 17])
def test_the_most_likely_token_and_its_probability(vocab_size: int, dtype: torch.dtype) -> None:
    """However many parts a row is read in. In bfloat16, several tokens are equally likely."""
    random = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(5, vocab_size + 3, generator=random)
    check(logits.to(dtype)[:, :vocab_size])  # the stride is longer than a row
    check(logits.to(dtype)[:, :vocab_size], num_rows=3)


def test_logits_further_apart_than_32_bits_count() -> None:
    """The last row's first logit has index 2^32 - 16, which in 32 bits is 16 before the first.

    Memory that is never touched takes no space, so only the rows do.
    """
    apart, size = (1 << 31) - 8, 5
    memory = torch.empty(16 + 2 * apart + size, dtype=torch.bfloat16)
    memory[:16] = 0.0
    logits = memory.as_strided((3, size), (apart, 1), storage_offset=16)
    logits.copy_(torch.tensor([0.0, 1.0, 4.0, 2.0, 3.0]))
    check(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [8, TILE + 1, 3 * TILE + 17, 12 * TILE])
def test_the_most_likely_tokens_and_their_probabilities(
    vocab_size: int, dtype: torch.dtype
) -> None:
    """All of one part, each of another, ties, a row with few that are not forbidden, and NaN."""
    random = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(7, vocab_size, generator=random)
    logits[1, :8] = 30.0 + torch.arange(8)
    logits[2, :: max(vocab_size // 8, 1)] = 40.0
    logits[3] = -INF
    logits[3, [2, vocab_size - 1]] = torch.tensor([1.0, 2.0])
    logits[4, vocab_size // 2] = NAN
    logits[5] = 0.0
    logits = logits.to(dtype)
    check_candidates(logits, 8)
