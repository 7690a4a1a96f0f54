"""Measures how many tokens a step must bring for drafting to pay, without a drafter."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.bench_result import CONCURRENCY, Results, Rounds, spread
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison, measure, without_details
from vllm_dflash.tools.bench.bench_setup import (
    build,
    check_concurrency,
    distinct,
    server_flags,
)
from vllm_dflash.tools.bench.rejected_drafts import RejectedDrafts
from vllm_dflash.tools.bench.sides import NO_PLUGIN, PLAIN, Side
from vllm_dflash.tools.completions import read_metrics
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import Server
from vllm_dflash.tools.server_process import FACTS_PATH
from vllm_dflash.tools.tables import Table

DRAFT_LENGTHS = [3, 7, 15]
"""K of the steps, if the user names none."""
STEP = "step_seconds"
LEAST_DRAFTED = 0.9
"""Share of steps that must have verified drafts; vLLM's counters may miss the last ones."""
TOKEN_TIME = "vllm:request_time_per_output_token_seconds"
METRICS = (f"{TOKEN_TIME}_sum", f"{TOKEN_TIME}_count", "vllm:num_preemptions_total")
"""Sum and number of the requests' mean times of a token after the first; interruptions."""
DOES_NOT_FIT = (
    "the KV cache does not hold all {all} requests, so they do not decode together. Lower"
    " --concurrency, --context or --output-len, or raise VLLM_CPU_KVCACHE_SPACE (on CPUs) or"
    " --kv-cache-memory-bytes."
)
WRONG_DRAFTS = (
    "vLLM verified {verified} drafts in {steps} steps of a request and accepted {accepted}, so"
    " these steps cannot be compared: raise --max-model-len, or lower --concurrency or K."
)


def verifying_side(k: int) -> Side:
    """Make the side that verifies K drafts in each step, none of which is accepted."""
    config: dict[str, Any] = {"num_speculative_tokens": k}
    if current_platform.is_cpu():
        config["model"] = f"{RejectedDrafts.__module__}.{RejectedDrafts.__name__}"
        config["method"] = "custom_class"
    else:  # on Model Runner V2 a text without a match is drafted, too
        config |= {"method": "ngram_gpu", "rejection_sample_method": "synthetic"}
        config["synthetic_acceptance_rates"] = [0.0] * k
    return Side(f"verify K={k}", "beside", NO_PLUGIN, config)


def compare_steps(parsed: argparse.Namespace, progress: Progress) -> Comparison:
    """Build the comparison of steps.

    Raises:
        ValueError: the arguments do not fit each other, or prompts cannot be read.
    """
    check_concurrency(parsed)
    given = {
        "--drafter": parsed.drafter,
        "--prompts": parsed.prompts,
        "--beside": parsed.beside,
        "--dataset-name": parsed.dataset_name,
        "--temperature": any(parsed.temperature),
        "--quick": parsed.quick,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise ValueError(
            f"--break-even only times steps, without a drafter: leave out {', '.join(wrong)}."
        )
    lengths = sorted({*(parsed.break_even or DRAFT_LENGTHS)})
    needed = max(parsed.context) + 2 * parsed.output_len + lengths[-1]
    parsed.max_model_len = max(parsed.max_model_len, needed)
    progress.say(
        f"requests have room for {parsed.max_model_len:,} tokens: the longest --context,"
        " --output-len twice, and K, or --max-model-len"
    )
    target = parsed.target
    if target is None:
        target = widened_demo(parsed.demo, parsed.out, positions=parsed.max_model_len).target
    comparison = build(
        parsed,
        progress,
        [Side(PLAIN, "plain", NO_PLUGIN, None), *map(verifying_side, lengths)],
        _plan_contexts(parsed, target),
        (target, target),
        server_flags(parsed, progress, target),  # with a prefix cache: prompts are read once
        # Where there is Triton, plain decoding would get V2, which has no custom proposers.
        environment={"VLLM_USE_V2_MODEL_RUNNER": "0"} if current_platform.is_cpu() else {},
    )
    comparison.measure, comparison.shorten = measure_steps, rejected
    comparison.record.table_makers, comparison.record.plots = [break_even_table], False
    return comparison


def _plan_contexts(parsed: argparse.Namespace, target: str) -> list[Cell]:
    """Plan cells of random prompts, one for each request; every round has the same ones."""
    flags = ["--model", target, "--temperature", "0", "--ignore-eos", "--seed", "0"]
    flags += ["--dataset-name", "random", "--output-len", str(parsed.output_len)]
    return [
        Cell(
            f"context {context:,}",
            count,
            (*flags, "--random-input-len", str(context), "--num-prompts", str(count)),
        )
        for context in distinct(parsed.context)
        for count in distinct(parsed.concurrency)
    ]


def measure_steps(server: Server, cell: Cell, seed: int, file: Path) -> dict[str, Any]:
    """Measure a cell, and the mean time of a step by the clock of the engine.

    A step yields one token of each request, since no draft is accepted. The client's clock also
    counts how long tokens wait for the client.

    Raises:
        ValueError: not all requests decoded together.
    """
    before = read_metrics(server)
    result = measure(server, cell, seed, file)
    after = read_metrics(server)
    seconds, count, preempted = (after[name] - before[name] for name in METRICS)
    needed = result["total_input_tokens"] + result["total_output_tokens"]
    if preempted or needed > server.ask(FACTS_PATH)["cache_tokens"]:
        raise ValueError(DOES_NOT_FIT.format(all=cell.concurrency))
    return result | {STEP: seconds / count}


def rejected(side: Side, result: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a result, if its drafts were verified and rejected."""
    check_drafts(result, side.draft_tokens or 0)
    return without_details(side, result)


def check_drafts(result: dict[str, Any], k: int) -> None:
    """Check that steps verified K drafts, and accepted none.

    Raises:
        ValueError: it is otherwise, so the times would say nothing.
    """
    steps = result["total_output_tokens"] - result["completed"]  # reading prompts yields a token
    names = "num_drafts", "draft_tokens", "accepted_tokens"
    drafts, verified, accepted = (result.get(f"spec_decode_{name}", 0) for name in names)
    if verified != k * drafts or accepted or (k and drafts < LEAST_DRAFTED * steps):
        raise ValueError(WRONG_DRAFTS.format(verified=verified, steps=steps, accepted=accepted))


def break_even(results: Results, load: str, count: int, side: Side) -> Rounds:
    """Return the time of a side's step / that of a plain step, [rounds]."""
    verified, plain = (results.rounds(load, count, name, STEP) for name in (side.name, PLAIN))
    return verified / plain


def break_even_table(results: Results, load: str) -> Table:
    """Make the table of a context, by number of requests and K."""
    sides = results.of_kind("beside")
    rows = []
    for count in results.settings(load):
        plain = 1000 * np.median(results.rounds(load, count, PLAIN, STEP))
        ratios = [spread(break_even(results, load, count, side)) for side in sides]
        rows.append([str(count), f"{plain:.1f} ms", *ratios])
    title = f"{load}: tokens a step must bring (1 + accepted drafts), without the drafter's own"
    title += " time; median of rounds (min - max)"
    return Table(title, [CONCURRENCY, "a plain step", *(s.draft_length for s in sides)], rows)
