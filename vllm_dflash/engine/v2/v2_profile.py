"""Profile at start-up on V2, whose drafter and context store are one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_dflash.engine.profile import (
    STEPS,
    fastest,
    measure_attention,
    measure_curve,
    profiled_rows,
    target_alone,
)
from vllm_dflash.model.adapters import Unadapted
from vllm_dflash.planning.costs import StepCosts
from vllm_dflash.planning.curves import Curve

FREE = Curve.of(np.array([1, 2]), np.zeros(2))


@torch.inference_mode()
def profile_v2(runner: GPUModelRunner) -> StepCosts:
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


def _has_room_for_blocks(runner: GPUModelRunner, rows: int) -> bool:
    """Whether a dummy run of so many rows has room for its blocks. A graph for requests of any
    lengths has one for each of its rows, padding included."""
    manager = runner.cudagraph_manager
    sizes = [size for size in (manager.captured_token_counts() if manager else ()) if size >= rows]
    requests = min([*sizes, rows][0], runner.max_num_reqs)
    return rows <= 2 or requests * runner.speculator.num_query_per_req <= runner.max_num_tokens


@torch.inference_mode()
def ragged_seconds(runner: GPUModelRunner) -> float:
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
        return fastest(run, before=run)

    alike = seconds(requests * rows, uniform=True)
    # A dummy batch has as many requests as it may, and one row more or less of some: so a row
    # fewer than such a batch has is a ragged one.
    most_requests, runner.max_num_reqs = runner.max_num_reqs, requests
    try:
        apart = seconds(requests * rows - 1)
    finally:
        runner.max_num_reqs = most_requests
    return max(apart - alike, 0.0)


def _dummy_steps(runner: GPUModelRunner) -> tuple[Callable[..., None], Callable[..., None]]:
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
