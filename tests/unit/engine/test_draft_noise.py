"""Drafts are drawn with the noise of the draws that verify them; in Triton's interpreter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler

from vllm_dflash.engine.v2 import v2_workers
from vllm_dflash.engine.v2.draft_noise import DraftNoise
from vllm_dflash.engine.v2.speculator import PlannedSpeculator
from vllm_dflash.engine.v2.v2_workers import V2Worker
from vllm_dflash.engine.worker import DraftingWorker

pytestmark = pytest.mark.v2
BLOCKS, K, CANDIDATES, TOKENS = 5, 3, 4, 40
TEMPERATURES = torch.tensor([0.0, 0.5, 1.0, 1.5])


def walker(random: torch.Generator) -> Any:
    """Return a speculator whose drafter's candidates have random scores, which depend on the
    candidate chosen before."""
    made: Any = object.__new__(PlannedSpeculator)
    made.num_speculative_steps, made.num_query_per_req = K, 1 + K
    shape = BLOCKS * K, CANDIDATES
    ids = torch.stack([torch.randperm(TOKENS, generator=random)[:CANDIDATES] for _ in range(15)])
    scores = 2 * torch.randn(BLOCKS, K, CANDIDATES, CANDIDATES, generator=random)
    made.model = SimpleNamespace(
        compute_candidates=lambda _: (ids, torch.zeros(shape)),
        score_candidates=lambda *_: scores,
    )
    made.input_buffers = SimpleNamespace(input_ids=torch.zeros(BLOCKS * (1 + K)))
    made.newest_context, made.use_fp64_gumbel = None, False
    made.temperature, made.seeds = TEMPERATURES, torch.arange(4)
    made.draft_tokens = torch.zeros(BLOCKS, K, dtype=torch.int64)
    made.sample_idx_mapping = torch.tensor([2, 0, 3, 1, -1]).repeat_interleave(K)
    made.sample_pos = torch.arange(BLOCKS * K) + 100
    made.candidates = CandidateSampler(BLOCKS, K, CANDIDATES, torch.device("cpu"))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_walks_draw_what_verification_would(seed: int) -> None:
    """From the same scores. What is left of these has no noise: it is the drafts' confidence."""
    speculator = walker(torch.Generator().manual_seed(seed))
    slots, positions = speculator.sample_idx_mapping, speculator.sample_pos - 1
    noise = DraftNoise(slots, positions, TEMPERATURES, speculator.seeds, None, False)
    hidden = torch.zeros(BLOCKS * K, 2)
    scores, tokens = (each.clone() for each in speculator._walk(hidden, noise))
    ids, _ = speculator.model.compute_candidates(None)
    of_target = torch.full((BLOCKS * K, TOKENS), -torch.inf).scatter(1, ids, scores)
    drawn = gumbel_sample(
        of_target,
        slots,
        TEMPERATURES,
        speculator.seeds,
        positions,
        apply_temperature=True,
        is_drafting=False,
    )
    somebodys = slots >= 0
    assert tokens[somebodys].tolist() == drawn[somebodys].tolist()
    chosen = (ids == tokens[:, None]).int().argmax(dim=1).view(BLOCKS, K)
    all_scores = speculator.model.score_candidates()
    for block in range(BLOCKS - 1):  # the last is nobody's
        before = 0
        for place in range(K):
            row = scores[block * K + place]
            torch.testing.assert_close(row, all_scores[block, place, before])
            before = int(chosen[block, place])
    _, most_likely = speculator._walk(hidden, None)
    assert torch.equal(tokens[slots == 0], most_likely[slots == 0])  # temperature 0
    assert not torch.equal(tokens, most_likely)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("verified_by_drawing", [False, True])
def test_where_drafts_are_drawn(
    monkeypatch: pytest.MonkeyPatch, asked: bool, verified_by_drawing: bool
) -> None:
    """Not where vLLM verifies by rejection: its noise must not be that of the drafts."""
    worker: Any = object.__new__(V2Worker)
    options = SimpleNamespace(draws_drafts=asked)
    worker.model_runner = None
    worker.drafter = SimpleNamespace(
        options=options,
        trees=None,
        slots=SimpleNamespace(forget_all=lambda: None),
        before_capture=lambda _: seen.append(worker.drafter.draws_drafts),
    )
    seen: list[bool] = []
    monkeypatch.setattr(v2_workers, "sample_by_drawing", lambda _: verified_by_drawing)
    monkeypatch.setattr(v2_workers, "fix_undrafted_graphs", lambda _: None)
    monkeypatch.setattr(DraftingWorker, "compile_or_warm_up_model", lambda _: None)
    worker.compile_or_warm_up_model()
    assert seen == [asked and verified_by_drawing]
