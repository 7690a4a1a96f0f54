"""Logits for the kernel that finds the most likely token, beside a softmax written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.confidence import TILE, find_argmax
from vllm_dflash.engine.v2.trees.tree_growth import MOST_CANDIDATES

NAN, INF = float("nan"), float("inf")
UNTOUCHED = 7
NOBODY_IS_SURE = 1.0
"""Stands for the logarithm of a confidence of 0."""


@dataclass
class Case:
    """Rows of logits: eight unusual ones and `num_others` others."""

    vocab_size: int
    num_others: int = 4


def logits_of(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Return [Q, V], with gaps between the rows. In bfloat16, many have several maxima."""
    random = torch.Generator().manual_seed(0)
    size = case.vocab_size
    logits = 4.0 * torch.randn(8 + case.num_others, size + 3, generator=random)
    logits[:, size:] = 99.0  # not of a token
    logits[0] = 0.0
    logits[1, [size - 1, 2 * TILE + 5, TILE, TILE + 9]] = 40.0  # ties between parts
    logits[2, size // 2], logits[3, size - 1] = NAN, INF
    logits[4] = -INF
    logits[5, : 3 * TILE] = -INF  # as if a bias forbids a stretch
    logits[6] = -INF
    logits[6, size - 1] = -50.0
    logits[7] = -1e30
    logits[7, 3] = 1e30
    return logits.to(dtype)[:, :size]


def check_candidates(logits: torch.Tensor, count: int) -> None:
    """Compare the most likely columns of each row, and their probabilities, with a stable sort."""
    shape = len(logits) + 1, count
    tokens = torch.full(shape, UNTOUCHED, device=logits.device)
    shares = torch.full(shape, float(UNTOUCHED), device=logits.device)
    confidence = torch.zeros(len(logits), device=logits.device)
    find_argmax(logits, tokens[:-1], confidence, shares[:-1])
    assert (tokens[-1] == UNTOUCHED).all()
    assert (shares[-1] == UNTOUCHED).all()
    assert torch.equal(shares[:-1, 0], confidence)
    for row, found, share in zip(logits.double().cpu(), tokens.cpu(), shares.cpu(), strict=False):
        if not row.max().isfinite():
            assert (found.tolist(), share.tolist()) == ([0] * count, [0.0] * count)
            continue
        order = row.sort(descending=True, stable=True).indices[:count]
        expected = (row[order] - row.logsumexp(0)).exp()
        torch.testing.assert_close(share.double(), expected, rtol=1e-4, atol=1e-30)
        is_there = expected > 0
        assert found[is_there].tolist() == order[is_there].tolist()
        assert ((found >= 0) & (found < len(row))).all()


def compare_confidence(
    logits: torch.Tensor, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logarithms of confidence of some rows, found and expected, so that all digits of small
    ones count. Tokens are exact, and no later row is written."""
    num_rows, device = len(logits) if num_rows is None else num_rows, logits.device
    tokens = torch.full((len(logits) + 1,), UNTOUCHED, device=device)
    confidence = torch.full((len(logits) + 1,), float(UNTOUCHED), device=device)
    find_argmax(logits, tokens[:num_rows], confidence[:num_rows])
    assert (tokens[num_rows:] == UNTOUCHED).all()
    assert (confidence[num_rows:] == UNTOUCHED).all()
    found = []
    expected = []
    rows = logits[:num_rows].double().cpu()
    for row, token, chance in zip(rows, tokens.tolist(), confidence.tolist(), strict=False):
        best = row.max()
        if not best.isfinite():  # NaN, too
            assert (token, chance) == (0, 0.0)
            found.append(NOBODY_IS_SURE)
            expected.append(NOBODY_IS_SURE)
            continue
        assert token == int((row == best).nonzero()[0])
        found.append(float(torch.tensor(chance, dtype=torch.float64).log()))
        expected.append(float(best - row.logsumexp(0)))
    return torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare the most likely tokens, and then the most likely one."""
    logits = logits_of(case, dtype).to(device)
    check_candidates(logits, MOST_CANDIDATES)
    return compare_confidence(logits)


CONFIDENCE = Oracle(
    "confidence",
    {
        "V = 9000": Case(9000),
        "V = 151936": Case(151936),
        "V = 262144": Case(262144),
        "V = 151936, 248 rows": Case(151936, 240),
    },
    compare,
    limits={torch.bfloat16: 1e-4, torch.float32: 1e-4},  # it computes in float32
    interpreted=("V = 9000", "V = 151936", "V = 262144"),
)
