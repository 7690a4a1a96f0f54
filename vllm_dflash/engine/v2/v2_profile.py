"""Profile at start-up on V2, where the drafter and the context store are one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_dflash.engine.profile import (
    ROW_COUNTS,
    least_seconds,
    measure_attention,
    measure_curve,
    profiled_rows,
    target_alone,
)
from vllm_dflash.model.adapters import WithoutLoRA
from vllm_dflash.planning.costs import Curve, StepCosts


@torch.inference_mode()
def profile_v2(runner: GPUModelRunner) -> StepCosts:
    """Measure step costs on Model Runner V2, where one graph drafts blocks and stores context.

    Dummy runs go through both models, so the drafter's cost is the difference to runs without it.
    """
    max_requests, block_rows = runner.max_num_reqs, runner.speculator.num_query_per_req
    # vLLM gives each request of a decoding dummy batch the rows of a block or a tree. But a graph
    # for requests of any lengths is run with one request for each row.
    rows = 1 + runner.num_speculative_steps
    most = min(runner.max_num_tokens, max_requests * max(block_rows, rows))
    # With more rows than requests, a batch drafts no more than a full one: with 1 request, 2 rows
    # draft as much as 1.
    fit = max(min(max_requests, most // block_rows), 2)
    few = [count for count in ROW_COUNTS if count <= fit and _has_room_for_blocks(runner, count)]
    verify, full = _dummy_steps(runner)
    # Other lengths run without a graph, which would seem to be the cost of their rows.
    of_each = [1 + length for length in lengths_to_choose(runner, rows - 1)]
    target = measure_curve(verify, profiled_rows(max_requests, most, of_each))
    both = measure_curve(full, few)
    seconds = np.maximum(both.seconds - target.at(both.counts), 0.0)

    def num_requests() -> int:
        return runner.speculator.num_dummy_requests

    longest = runner.max_model_len - rows
    attention = measure_attention(verify, full, rows, longest, num_requests)
    of_target = attention.plain + attention.draft * (rows / num_requests() - 1)
    attention = attention._replace(block=max(attention.block - of_target, 0.0))
    drafting, free = Curve(both.counts * block_rows, seconds), Curve(both.counts, 0 * seconds)
    first_draft_row = block_rows - runner.speculator.num_speculative_steps
    return StepCosts(target, drafting, free, max_requests, attention, first_draft_row)


def _has_room_for_blocks(runner: GPUModelRunner, rows: int) -> bool:
    """Whether a dummy run of `rows` rows has room for its blocks. A graph for requests of any
    lengths has a request for each of its rows, padding included."""
    manager = runner.cudagraph_manager
    sizes = [size for size in (manager.captured_token_counts() if manager else ()) if size >= rows]
    requests = min([*sizes, rows][0], runner.max_num_reqs)
    return rows <= 2 or requests * runner.speculator.num_query_per_req <= runner.max_num_tokens


def lengths_to_choose(runner: GPUModelRunner, max_draft: int) -> list[int]:
    """Draft lengths that all requests of a step can share, ascending: from 0 to K for chains, and
    more for trees. Call this after graphs are captured."""
    manager = runner.cudagraph_manager
    captured = {graph.uniform_token_count for graph in manager.graphs} if manager else set()
    lengths = {count - 1 for count in captured if count}
    if not lengths:  # no graphs, or, with vLLM's adaptive verification, graphs for any lengths
        return list(range(max_draft + 1))
    return sorted(lengths | {0, max_draft})


@contextmanager
def dummy_requests(runner: GPUModelRunner, most: int) -> Iterator[None]:
    """Context in which the runner's dummy batches have at most so many requests."""
    before, runner.max_num_reqs = runner.max_num_reqs, most
    try:
        yield
    finally:
        runner.max_num_reqs = before


@torch.inference_mode()
def ragged_seconds(runner: GPUModelRunner) -> float:
    """Extra time of a step whose requests have different numbers of rows, in seconds.

    If graphs are captured for certain numbers of rows per request, a batch that mixes them runs
    piecewise. 0 if no step has such a graph, or all have.
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
        return least_seconds(run, before=run)

    uniform_seconds = seconds(requests * rows, uniform=True)
    # A dummy batch has the maximum number of requests, whose rows differ by one at most. So one
    # row less than the uniform batch makes it ragged.
    with dummy_requests(runner, requests):
        apart = seconds(requests * rows - 1)
    return max(apart - uniform_seconds, 0.0)


def _dummy_steps(runner: GPUModelRunner) -> tuple[Callable[..., None], Callable[..., None]]:
    """Functions that run a dummy step with given rows and context per request: of the target and
    its head alone, and with a block."""
    prepare, unadapted = runner.prepare_dummy_attn, WithoutLoRA(runner.model)
    state = runner.model_state
    prepare_metadata = state.prepare_attn

    def full(rows: int, context: int = 0, *, uniform: bool = False) -> None:
        # Rows with context belong to one request, unless a graph takes requests of any lengths.
        uniform = uniform or (context > 0 and rows > 1)

        def prepare_rows(batch: InputBatch, *args: Any) -> Any:
            # vLLM marks all rows as padding, for which no expert runs.
            batch.is_padding[:rows].fill_(False)
            return prepare(batch, *args)

        def prepare_lengths(batch: InputBatch, *args: Any, **kwargs: Any) -> Any:
            # For graphs, TRITON_ATTN takes all contexts for as short as while it captures them.
            lengths = batch.seq_lens.clone()
            found = prepare_metadata(batch, *args, **kwargs)
            batch.seq_lens.copy_(lengths)
            return found

        runner.prepare_dummy_attn, state.prepare_attn = prepare_rows, prepare_lengths
        try:  # random tokens: equal ones would go to the same experts
            hidden, _ = runner._dummy_run(
                rows,
                context_len=context,
                uniform_decode=uniform,
                skip_eplb=True,  # it counts the experts that requests use
                randomize_inputs=True,
            )
        finally:
            runner.prepare_dummy_attn, state.prepare_attn = prepare, prepare_metadata
        with unadapted:  # sample a token for each row, in vLLM's chunks
            for chunk in hidden[:rows].split(get_max_chunk_logits(runner.vocab_size)):
                runner.model.compute_logits(chunk).argmax(dim=-1)
        torch.accelerator.synchronize()

    return target_alone(runner.speculator)(full), full
