"""Start-up profile: what the target, the drafter and the context store cost by number of rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.curves import Curve

SECONDS_PER_CURVE = 2.0
"""A curve is profiled up to where this is used up; beyond, its last slope goes on."""
REPEATS = 3
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FREE = Curve(np.array([1, 2]), np.zeros(2))
CONTEXT_TOKENS = 128
"""Length of the dummy requests the target is profiled with."""


def profiled_rows(max_requests: int, most: int) -> list[int]:
    """Numbers of rows to profile: batches of one row each, then full batches of several.

    vLLM's dummy batches give all that is left over to one request, which then would be longer
    than its cache; so a batch is either not full or evenly filled.
    """
    rows = {count for count in STEPS if count <= max_requests}
    rows |= {max_requests * each for each in STEPS}
    return sorted(count for count in rows if count <= most)


def measure_curve(
    run: Callable[[int], object],
    rows: Iterable[int],
    agree: Callable[[float], float],
    budget: float = SECONDS_PER_CURVE,
) -> Curve:
    """Time `run(rows)` for growing numbers of rows.

    Args:
        run: does the work; ends when it is done.
        rows: ascending, at least two.
        agree: maps what this rank measured to what all ranks go by.
        budget: seconds after which no more points are measured.
    """
    counts: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for count in rows:
        run(count)  # kernels for a new number of rows are built by its first run
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - started)
        counts.append(count)
        seconds.append(agree(min(times)))
        spent += agree(sum(times))
        if spent > budget and len(counts) >= 2:
            break
    return Curve(np.array(counts), np.array(seconds))


@contextmanager
def target_alone(drafter: Any) -> Iterator[None]:
    """Dummy runs inside leave the drafter out."""
    drafter.runs_target_alone = True
    try:
        yield
    finally:
        drafter.runs_target_alone = False


@torch.inference_mode()
def profile_v1(runner: GPUModelRunner, agree: Callable[[float], float]) -> StepCosts:
    """Measure with dummy batches; the same calls on every rank. Takes a few seconds."""
    proposer = runner.drafter
    max_requests = proposer.max_batch_size
    most = min(runner.max_num_tokens, max_requests * (1 + proposer.num_speculative_tokens))
    rows = profiled_rows(max_requests, most)
    context_tokens = min(CONTEXT_TOKENS, runner.max_model_len)
    features = torch.zeros(most, proposer.feature_width, dtype=proposer.dtype)
    positions = torch.arange(most) % proposer.max_model_len
    nowhere = torch.full((most,), -1)
    ids = torch.zeros(most, dtype=torch.int32)

    def verify(count: int) -> None:
        hidden, _ = runner._dummy_run(count, force_attention=True, profile_seq_lens=context_tokens)
        runner.model.compute_logits(hidden)

    def draft(count: int) -> None:
        hidden = proposer.block.run(None, {}, ids[:count], positions[:count])
        proposer.block.pick(hidden)

    def store(count: int) -> None:
        proposer.model.context.store(features[:count], positions[:count], nowhere[:count])

    with target_alone(proposer):
        verify_curve = measure_curve(verify, rows, agree)
    return StepCosts(
        verify_curve,
        measure_curve(draft, rows, agree),
        measure_curve(store, rows, agree, SECONDS_PER_CURVE / 4),
        max_requests,
    )


@torch.inference_mode()
def profile_v2(runner: GPUModelRunnerV2, agree: Callable[[float], float]) -> StepCosts:
    """The same for Model Runner V2, whose draft step is one graph: blocks and context together.

    Its dummy runs go through both models, so the drafter is what they take longer with it.
    """
    speculator = runner.speculator
    max_requests = runner.max_num_reqs
    block_rows = speculator.num_query_per_req
    most = min(runner.max_num_tokens, max_requests * block_rows)
    # A batch of more rows than requests is drafted like a full one.
    few = [rows for rows in STEPS if rows <= min(max_requests, most // block_rows)]

    def verify(count: int) -> None:
        with target_alone(speculator):
            runner._dummy_run(count)
        torch.accelerator.synchronize()

    def whole(count: int) -> None:
        runner._dummy_run(count)
        torch.accelerator.synchronize()

    verify_curve = measure_curve(verify, profiled_rows(max_requests, most), agree)
    both = measure_curve(whole, few, agree) if len(few) > 1 else verify_curve
    seconds = np.maximum(both.seconds - verify_curve.at(both.counts), 0.0)
    draft_curve = Curve(both.counts * block_rows, seconds)
    return StepCosts(verify_curve, draft_curve, FREE, max_requests)
