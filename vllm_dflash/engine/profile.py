"""Start-up profile: what the target, the drafter and the context store cost by number of rows.

With dummy batches, the same on every rank; takes a few seconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_dflash.engine.agreement import from_rank_0
from vllm_dflash.engine.block_layout import block_inputs
from vllm_dflash.model.adapters import Unadapted
from vllm_dflash.planning.costs import NO_ATTENTION, Attention, StepCosts
from vllm_dflash.planning.curves import Curve

SECONDS_PER_CURVE = 1.0
"""A curve is profiled up to where this is used up; beyond, its last slope goes on."""
REPEATS = 3
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FREE = Curve.of(np.array([1, 2]), np.zeros(2))
POWERS = tuple(2**power for power in range(11))
CONTEXT_TOKENS = 128
"""Length of the dummy requests that models are profiled with."""
FAR_CONTEXT_TOKENS = 8192
"""And of the long ones, whose difference to those is what attention takes."""


def fastest(run: Callable[[], object], before: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, `before` each of which something is done."""
    times = []
    for _ in range(REPEATS):
        before()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def measure_curve(
    run: Callable[[int], object],
    rows: Iterable[int],
    budget: float = SECONDS_PER_CURVE,
    before: Callable[[], object] = lambda: None,
) -> Curve:
    """Time `run(rows)` for growing numbers of rows, at least two, for so many seconds at most."""
    counts: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for count in rows:
        run(count)  # kernels for a new number of rows are built by its first run
        began = time.perf_counter()
        seconds.append(from_rank_0(fastest(functools.partial(run, count), before)))
        counts.append(count)
        spent += from_rank_0(time.perf_counter() - began)
        if spent > budget and len(counts) >= 2:
            break
    return Curve.of(np.array(counts), np.array(seconds))


def profiled_rows(max_requests: int, most: int) -> list[int]:
    """Numbers of rows to profile: batches of one row each, then full batches of several.

    vLLM's dummy batches give all that is left over to one request, which then would be longer
    than its cache; so a batch is either not full or evenly filled.
    """
    rows = {count for count in STEPS if count <= max_requests}
    rows |= {max_requests * each for each in STEPS}
    return sorted(count for count in rows if count <= most)


def measure_attention(
    verify: Callable[[int, int], object],
    block: Callable[[int, int], object],
    block_rows: int,
    longest: int,
    num_requests: Callable[[], int] = lambda: 1,
) -> Attention:
    """What tokens of context add to a step, if any request can have many.

    Args:
        verify: runs the target with so many rows of one request, and so much context.
        block: the same of whatever drafts a block.
        block_rows: of a block.
        longest: tokens of context that a block can have.
        num_requests: that the last run had, each with so much context, and a block.
    """
    near, far = CONTEXT_TOKENS, min(FAR_CONTEXT_TOKENS, longest)
    if far <= 2 * near:
        return NO_ATTENTION

    def per_token(run: Callable[[int, int], object], rows: int) -> float:
        curve = measure_curve(lambda context: run(rows, context), (near, far))
        return float(curve.seconds[1] - curve.seconds[0]) / (far - near)

    plain = per_token(verify, 1) / num_requests()
    drafted, count = per_token(verify, block_rows), num_requests()
    # Where each request has one row, nothing is known of more. Steps will show it.
    more = max(drafted - count * plain, 0.0) / (block_rows - count) if count < block_rows else 0.0
    return Attention(plain, more, per_token(block, block_rows) / count)


@contextmanager
def target_alone(drafter: Any) -> Iterator[None]:
    """Dummy runs inside leave the drafter out."""
    drafter.runs_target_alone = True
    try:
        yield
    finally:
        drafter.runs_target_alone = False


@torch.inference_mode()
def profile_v1(runner: GPUModelRunner) -> StepCosts:
    """Each part by itself.

    In a step the drafter follows the target, whose weights have run through the processor's caches;
    so its parts are measured behind a step of the target, too.
    """
    proposer = runner.drafter
    max_requests, block_rows = proposer.max_batch_size, 1 + proposer.width
    most = min(runner.max_num_tokens, max_requests * block_rows)
    # Few requests with free drafts, which are longer than a block, have more rows.
    reach = max(most, min(runner.max_num_tokens, 4 * (1 + proposer.num_speculative_tokens)))
    features = torch.zeros(most, proposer.feature_width, dtype=proposer.dtype)
    positions = torch.arange(most) % proposer.max_model_len
    nowhere = torch.full((most,), -1)
    longest = runner.max_model_len - block_rows
    unadapted = Unadapted(runner.model)  # of all rows, and not as many as are sampled of

    def verify(rows: int, context: int, *, of_one: bool = False) -> None:
        with target_alone(proposer):
            hidden, _ = runner._dummy_run(
                rows, force_attention=True, profile_seq_lens=context, uniform_decode=of_one
            )
        with unadapted:
            runner.model.compute_logits(hidden)

    def draft(rows: int, context: int) -> None:
        requests = -(-rows // block_rows)
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
        newest = features[:requests] if proposer.block.reads_newest else None
        proposer.block.draft(inputs, table, newest)

    def store(rows: int) -> None:
        proposer.model.context.store(features[:rows], positions[:rows], nowhere[:rows])

    near = min(CONTEXT_TOKENS, max(longest, 1))

    def target() -> None:
        verify(1, near)

    parts = {max(block_rows // 4, 2), max(block_rows // 2, 2)}
    blocks = sorted(parts | {n for each in POWERS if (n := block_rows * each) <= most})
    contexts = [rows for rows in POWERS if rows <= most]
    return StepCosts.of(
        measure_curve(lambda rows: verify(rows, near), profiled_rows(max_requests, reach)),
        measure_curve(lambda rows: draft(rows, near), blocks, before=target),
        measure_curve(store, contexts, SECONDS_PER_CURVE / 2, before=target),
        max_requests,
        measure_attention(
            lambda rows, context: verify(rows, context, of_one=rows > 1), draft, block_rows, longest
        ),
    )


@torch.inference_mode()
def profile_v2(runner: GPUModelRunnerV2) -> StepCosts:
    """The same for Model Runner V2, whose draft step is one graph: blocks and context together.

    Its dummy runs go through both models, so the drafter is what they take longer with it.
    """
    max_requests, block_rows = runner.max_num_reqs, runner.speculator.num_query_per_req
    most = min(runner.max_num_tokens, max_requests * block_rows)
    # A batch of more rows than requests is drafted like a full one: two rows of one, like one.
    few = [rows for rows in STEPS if rows <= max(min(max_requests, most // block_rows), 2)]
    few = [rows for rows in few if _has_room_for_blocks(runner, rows)]
    verify, whole = _dummy_steps(runner)
    target = measure_curve(verify, profiled_rows(max_requests, most))
    both = measure_curve(whole, few)
    seconds = np.maximum(both.seconds - target.at(both.counts), 0.0)
    # Of a dummy batch that decodes, vLLM gives each request as many: a block's, or a tree's. But
    # a graph for requests of any lengths is run with a request for each row.
    rows = 1 + runner.num_speculative_steps

    def num_requests() -> int:
        return runner.speculator.num_dummy_requests

    longest = runner.max_model_len - rows
    attention = measure_attention(verify, whole, rows, longest, num_requests)
    of_target = attention.plain + attention.draft * (rows / num_requests() - 1)
    attention = attention._replace(block=max(attention.block - of_target, 0.0))
    return StepCosts.of(
        target, Curve.of(both.counts * block_rows, seconds), FREE, max_requests, attention
    )


def _has_room_for_blocks(runner: GPUModelRunnerV2, rows: int) -> bool:
    """Whether a dummy run of so many rows has room for its blocks. A graph for requests of any
    lengths has one for each of its rows, padding included."""
    manager = runner.cudagraph_manager
    sizes = [size for size in (manager.captured_token_counts() if manager else ()) if size >= rows]
    requests = min([*sizes, rows][0], runner.max_num_reqs)
    return rows <= 2 or requests * runner.speculator.num_query_per_req <= runner.max_num_tokens


@torch.inference_mode()
def ragged_seconds(runner: GPUModelRunnerV2) -> float:
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

    def seconds(count: int, *, uniform: bool = False) -> float:
        run = functools.partial(verify, count, uniform=uniform)
        return from_rank_0(fastest(run, before=run))

    alike = seconds(requests * rows, uniform=True)
    # A dummy batch has as many requests as it may, and one row more or less of some: so a row
    # fewer than such a batch has is a ragged one.
    most_requests, runner.max_num_reqs = runner.max_num_reqs, requests
    try:
        apart = seconds(requests * rows - 1)
    finally:
        runner.max_num_reqs = most_requests
    return max(apart - alike, 0.0)


def _dummy_steps(runner: GPUModelRunnerV2) -> tuple[Callable[..., None], Callable[..., None]]:
    """Steps of V2 for some number of rows, and as much context of each request: of the target and
    its head alone, and with a block."""
    prepare, unadapted = runner.prepare_dummy_attn, Unadapted(runner.model)

    def whole(rows: int, context: int = 0, *, uniform: bool = False) -> None:
        # Rows with a context are those of one request, unless there is a graph for any lengths.
        uniform = uniform or (context > 0 and rows > 1)

        def prepare_rows(batch: InputBatch, *args: Any) -> Any:
            # vLLM marks all as padding, which no expert is run for.
            batch.is_padding[:rows].fill_(False)
            return prepare(batch, *args)

        runner.prepare_dummy_attn = prepare_rows
        try:  # of random tokens: the same ones would go to the same experts
            hidden, _ = runner._dummy_run(
                rows,
                context_len=context,
                uniform_decode=uniform,
                skip_eplb=True,  # whose counts of experts are those of requests
                randomize_inputs=True,
            )
        finally:
            runner.prepare_dummy_attn = prepare
        with unadapted:  # a token of each row is sampled, in vLLM's chunks of memory
            for chunk in hidden[:rows].split(get_max_chunk_logits(runner.vocab_size)):
                runner.model.compute_logits(chunk).argmax(dim=-1)
        torch.accelerator.synchronize()

    return target_alone(runner.speculator)(whole), whole
