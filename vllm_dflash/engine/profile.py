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

from vllm_dflash.engine.block_layout import block_inputs
from vllm_dflash.planning.costs import Attention, Curve, StepCosts

SECONDS_PER_CURVE = 2.0
"""A curve is profiled up to where this is used up; beyond, its last slope goes on."""
REPEATS = 3
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FREE = Curve(np.array([1, 2]), np.zeros(2))
POWERS = tuple(2**power for power in range(11))
CONTEXT_TOKENS = 128
"""Length of the dummy requests that models are profiled with."""
FAR_CONTEXT_TOKENS = 8192
"""And of the long ones, whose difference to those is what attention takes."""


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
    before: Callable[[], object] = lambda: None,
) -> Curve:
    """Time `run(rows)` for growing numbers of rows.

    Args:
        run: does the work; ends when it is done.
        rows: ascending, at least two.
        agree: maps what this rank measured to what all ranks go by.
        budget: seconds after which no more points are measured.
        before: what is done before each run, and not timed.
    """
    counts: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for count in rows:
        run(count)  # kernels for a new number of rows are built by its first run
        times, began = [], time.perf_counter()
        for _ in range(REPEATS):
            before()
            started = time.perf_counter()
            run(count)
            times.append(time.perf_counter() - started)
        counts.append(count)
        seconds.append(agree(min(times)))
        spent += agree(time.perf_counter() - began)
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
    """Measure with dummy batches; the same calls on every rank. Takes a few seconds.

    In a step the drafter follows the target, whose weights have run through the processor's caches;
    so its parts are measured behind a step of the target, too.
    """
    proposer = runner.drafter
    max_requests, block = proposer.max_batch_size, 1 + proposer.width
    longest = runner.max_model_len - block
    near, far = min(CONTEXT_TOKENS, max(longest, 1)), min(FAR_CONTEXT_TOKENS, longest)
    most = min(runner.max_num_tokens, max_requests * block)
    # Few requests with free drafts, which are longer than a block, have more rows.
    reach = max(most, min(runner.max_num_tokens, 4 * (1 + proposer.num_speculative_tokens)))
    features = torch.zeros(most, proposer.feature_width, dtype=proposer.dtype)
    positions = torch.arange(most) % proposer.max_model_len
    nowhere = torch.full((most,), -1)

    def verify(count: int, context: int | None = None, uniform: bool = False) -> None:
        context = context or min(CONTEXT_TOKENS, runner.max_model_len)
        with target_alone(proposer):
            hidden, _ = runner._dummy_run(
                count, force_attention=True, profile_seq_lens=context, uniform_decode=uniform
            )
        runner.model.compute_logits(hidden)

    def draft(rows: int, context: int = near) -> None:
        requests = -(-rows // block)
        table = torch.zeros(
            requests, -(-runner.max_model_len // proposer.block_size), dtype=torch.int32
        )
        inputs = block_inputs(
            np.full(requests, context),
            np.full(requests, rows // requests - 1),
            np.zeros(requests, dtype=np.int32),
            proposer.spec.mask_token_id,
            table.numpy(),
            proposer.block_size,
        )
        inputs.slots[:] = -1  # nothing is written
        proposer.block.draft(inputs, table)

    def store(count: int) -> None:
        proposer.model.context.store(features[:count], positions[:count], nowhere[:count])

    def behind_target(run: Callable[[int], object], rows: Iterable[int], budget: float) -> Curve:
        return measure_curve(run, rows, agree, budget, before=lambda: verify(1))

    blocks = sorted({max(block // 4, 2), max(block // 2, 2), *(block * n for n in POWERS)})
    costs = StepCosts(
        measure_curve(verify, profiled_rows(max_requests, reach), agree),
        behind_target(draft, blocks[:2] + [n for n in blocks[2:] if n <= most], SECONDS_PER_CURVE),
        behind_target(store, [n for n in POWERS if n <= most], SECONDS_PER_CURVE / 2),
        max_requests,
    )
    if far > 2 * near and block <= most:

        def per_token(run: Callable[[int], object], times: int = 1) -> float:
            """Seconds that a token of context adds to so many rows."""
            curve = measure_curve(run, (near, far), agree)
            return float(curve.seconds[1] - curve.seconds[0]) / (far - near) / times

        plain = per_token(lambda context: verify(1, context))
        drafted = per_token(lambda context: verify(block, context, uniform=True))
        reading = per_token(lambda context: draft(block, context))
        more = max(drafted - plain, 0.0) / (block - 1)
        costs.records["attention"] = Attention(plain, more, reading)
    return costs


@torch.inference_mode()
def profile_v2(runner: GPUModelRunnerV2, agree: Callable[[float], float]) -> StepCosts:
    """The same for Model Runner V2, whose draft step is one graph: blocks and context together.

    Its dummy runs go through both models, so the drafter is what they take longer with it.
    """
    speculator = runner.speculator
    max_requests, block_rows = runner.max_num_reqs, speculator.num_query_per_req
    most = min(runner.max_num_tokens, max_requests * block_rows)
    # A batch of more rows than requests is drafted like a full one.
    few = [rows for rows in STEPS if rows <= min(max_requests, most // block_rows)]
    verify, whole = _dummy_steps(runner)
    verify_curve = measure_curve(verify, profiled_rows(max_requests, most), agree)
    both = measure_curve(whole, few, agree) if len(few) > 1 else verify_curve
    seconds = np.maximum(both.seconds - verify_curve.at(both.counts), 0.0)
    draft_curve = Curve(both.counts * block_rows, seconds)
    costs = StepCosts(verify_curve, draft_curve, FREE, max_requests)
    longest = runner.max_model_len - block_rows
    near, far = min(CONTEXT_TOKENS, max(longest, 1)), min(FAR_CONTEXT_TOKENS, longest)
    if far > 2 * near and block_rows <= most:

        def per_token(run: Callable[..., object], rows: int) -> float:
            """Seconds that a token of context adds to a request's so many rows."""
            curve = measure_curve(
                lambda context: run(rows, context_len=context, uniform_decode=rows > 1),
                (near, far),
                agree,
            )
            return float(curve.seconds[1] - curve.seconds[0]) / (far - near)

        plain, drafted = per_token(verify, 1), per_token(verify, block_rows)
        more = max(drafted - plain, 0.0) / (block_rows - 1)
        block = max(per_token(whole, block_rows) - drafted, 0.0)
        costs.records["attention"] = Attention(plain, more, block)
    return costs


@torch.inference_mode()
def ragged_seconds(runner: GPUModelRunnerV2, agree: Callable[[float], float]) -> float:
    """What a step takes longer, on V2, whose requests do not have as many rows each as the others.

    Where graphs are captured for some numbers of rows a request, a batch that mixes them runs
    piece by piece. Nothing where no step has such a graph, or all have.
    """
    manager, most = runner.cudagraph_manager, runner.max_num_tokens
    counts = {graph.uniform_token_count for graph in manager.graphs} if manager else set()
    rows = runner.num_speculative_steps + 1
    requests = min(4, runner.max_num_reqs, most // rows)
    if rows not in counts or requests < 2:
        return 0.0
    verify, _ = _dummy_steps(runner)
    alike = agree(_fastest(lambda: verify(requests * rows, uniform_decode=True)))
    # A dummy batch has as many requests as it may, and one row more or less of some: so a row
    # fewer than such a batch has is a ragged one.
    most_requests, runner.max_num_reqs = runner.max_num_reqs, requests
    try:
        apart = agree(_fastest(lambda: verify(requests * rows - 1)))
    finally:
        runner.max_num_reqs = most_requests
    return max(apart - alike, 0.0)


def _dummy_steps(runner: GPUModelRunnerV2) -> tuple[Callable[..., None], Callable[..., None]]:
    """Steps of V2 for some number of rows: of the target alone, and with a block behind it."""

    def whole(count: int, **kind: Any) -> None:
        runner._dummy_run(count, **kind)
        torch.accelerator.synchronize()

    def verify(count: int, **kind: Any) -> None:
        with target_alone(runner.speculator):
            whole(count, **kind)

    return verify, whole


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest run of several, behind one that does not count."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
