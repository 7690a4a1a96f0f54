"""Drafts that are drawn, beside what verification draws from the same logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from support.kernel_oracle import Oracle
from vllm_dflash.engine.v2.confidence import find_argmax
from vllm_dflash.engine.v2.draft_noise import DraftNoise, noise_of

TEMPERATURES = 0.0, 1.0, 0.7, 1.5
NUM_CANDIDATES = 4


@dataclass
class Case:
    """Rows of several requests, and padding that is nobody's."""

    num_rows: int
    vocab_size: int
    has_own_vocabulary: bool = False
    """Whether the drafter's logits are of every third token of the target."""
    use_fp64: bool = False


def compare(
    case: Case, *, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that drafts get and that vLLM's sampler draws, for whole vocabularies and
    for a few candidates."""
    random = torch.Generator().manual_seed(case.num_rows)
    size, count = case.vocab_size, case.num_rows
    logits = (3.0 * torch.randn(count, size + 3, generator=random)).to(device, dtype)[:, :size]
    slots = torch.randint(-1, len(TEMPERATURES), (count,), generator=random).to(device)
    seeds = torch.randint(-(2**62), 2**62, (len(TEMPERATURES),), generator=random).to(device)
    d2t = 2 * torch.arange(size, device=device) if case.has_own_vocabulary else None
    noise = DraftNoise(
        slots,
        torch.randint(0, 9_000, (count,), generator=random).to(device),
        torch.tensor(TEMPERATURES, device=device),
        seeds,
        d2t,
        case.use_fp64,
    )
    ids = torch.arange(size, device=device) + (0 if d2t is None else d2t)
    drawn, confidence = torch.zeros_like(slots), torch.zeros(count, device=device)
    find_argmax(logits, drawn, confidence, noise=noise)
    most_likely, expected_confidence = torch.zeros_like(slots), torch.zeros_like(confidence)
    find_argmax(logits, most_likely, expected_confidence)
    # The same numbers, but a GPU may add them in another order: Triton gives a thread two columns
    # at a time where it reads `d2t`, and one where it does not (seen on an H200).
    rounding = 1e-5 if d2t is not None and logits.is_cuda else 0.0
    torch.testing.assert_close(confidence, expected_confidence, rtol=rounding, atol=0.0)
    assert torch.equal(drawn[slots <= 0], most_likely[slots <= 0])  # temperature 0, and nobody's
    found, expected = [ids[drawn]], [_verified(logits, ids, noise)]
    # Ascending: of equal logits, which bfloat16 has, both sides take the first.
    some = [torch.randperm(size, generator=random)[:NUM_CANDIDATES] for _ in range(count)]
    columns = torch.stack(some).sort(dim=1).values.to(device)
    candidates, few = ids[columns], logits.gather(1, columns).float()
    best = (few + noise_of(candidates, noise)).argmax(dim=1, keepdim=True)
    found.append(candidates.gather(1, best).flatten())
    others = torch.full_like(logits, -torch.inf, dtype=torch.float32).scatter(1, columns, few)
    expected.append(_verified(others, ids, noise))
    return torch.stack(found).double().cpu(), torch.stack(expected).double().cpu()


def _verified(logits: torch.Tensor, ids: torch.Tensor, noise: DraftNoise) -> torch.Tensor:
    """Return the tokens that vLLM's sampler draws from logits of these tokens, [Q]."""
    of_target = torch.full((len(logits), int(ids.max()) + 1), -torch.inf, device=logits.device)
    of_target[:, ids] = logits.float()
    drawn: torch.Tensor = gumbel_sample(
        of_target,
        noise.row_slots,
        noise.temperatures,
        noise.seeds,
        noise.positions,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=noise.use_fp64,
    )
    return drawn


DRAWN_DRAFTS = Oracle(
    "drawn drafts",
    {
        "V = 9": Case(12, 9),
        "V = 9000": Case(20, 9000),
        "V = 5000, own": Case(20, 5000, has_own_vocabulary=True),
        "V = 300, float64": Case(20, 300, use_fp64=True),
        "V = 151936": Case(105, 151_936),
        "V = 32000, own": Case(240, 32_000, has_own_vocabulary=True),
    },
    compare,
    limits={torch.bfloat16: 0.0, torch.float32: 0.0},
    interpreted=("V = 9", "V = 9000", "V = 5000, own", "V = 300, float64"),
)
