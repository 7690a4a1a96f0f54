"""Measures how many tokens a step must bring for drafting to pay, without a drafter."""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import numpy as np
from vllm.platforms import current_platform

from vllm_dflash.tools.bench.bench_pair import widened_demo
from vllm_dflash.tools.bench.bench_result import CONCURRENCY, Results, Rounds, spread
from vllm_dflash.tools.bench.bench_runs import Cell, Comparison
from vllm_dflash.tools.bench.bench_setup import build, check_concurrency, client_flags, distinct
from vllm_dflash.tools.bench.rejected_drafts import RejectedDrafts
from vllm_dflash.tools.bench.sides import CACHE_SIZE, NO_PLUGIN, PLAIN, Side
from vllm_dflash.tools.demo_files import demo_folder
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import flag_names
from vllm_dflash.tools.tables import Table

DRAFT_LENGTHS = [3, 7, 15]
"""K of the steps, if the user names none."""
STEP = "step_seconds"
LEAST_DRAFTED = 0.9
"""Share of steps that must have verified drafts; vLLM's counters may miss the last ones."""
LEAST_CACHE = 2 << 30
"""Least bytes of a server's KV cache on CPUs. Each keeps the requests of all measurements."""
PROMPTS_DROPPED = (
    "the KV cache holds {room:,} tokens, and the requests of all measurements have {kept:,}: then"
    " they do not stay in it, or wait for each other. Lower --concurrency, --context or"
    " --output-len, or raise VLLM_CPU_KVCACHE_SPACE (on CPUs) or --kv-cache-memory-bytes."
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
        ValueError: the arguments do not fit each other.
    """
    check_concurrency(parsed)
    if parsed.output_len < 2:
        raise ValueError("--break-even times tokens after the first: raise --output-len.")
    lengths = sorted({*(parsed.break_even or DRAFT_LENGTHS)})
    needed = max(parsed.context) + 2 * parsed.output_len + lengths[-1]
    parsed.max_model_len = max(parsed.max_model_len, needed)
    progress.say(
        f"requests have room for {parsed.max_model_len:,} tokens: the longest --context,"
        " --output-len twice, and K, or --max-model-len"
    )
    target = parsed.target
    if target is None:
        target = widened_demo(demo_folder(), parsed.out, positions=parsed.max_model_len).target
    sides = [Side(PLAIN, "plain", NO_PLUGIN, None), *map(verifying_side, lengths)]
    # With a prefix cache: prompts are read once.
    comparison = build(parsed, progress, sides, _plan_contexts(parsed, target), target, target)
    if current_platform.is_cpu():
        # Where there is Triton, plain decoding would get V2, which has no custom proposers.
        comparison.environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        if CACHE_SIZE not in flag_names(parsed.flags):
            asked = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", 0)) * (1 << 30)
            comparison.flags += [CACHE_SIZE, str(max(LEAST_CACHE, int(asked)))]
    counts = distinct(parsed.concurrency)
    kept = sum(counts) * sum(one + parsed.output_len for one in distinct(parsed.context))
    comparison.check = partial(check_steps, kept=kept)
    comparison.record.make_tables = break_even_tables
    return comparison


def _plan_contexts(parsed: argparse.Namespace, target: str) -> list[Cell]:
    """Plan cells of random prompts, one for each request; every round has the same ones."""
    flags = ["--model", target, *client_flags(parsed.flags), "--temperature", "0", "--ignore-eos"]
    flags += ["--dataset-name", "random", "--output-len", str(parsed.output_len), "--seed", "0"]
    return [
        Cell(
            f"context {context:,}",
            count,
            (*flags, "--random-input-len", str(context), "--num-prompts", str(count)),
        )
        for context in distinct(parsed.context)
        for count in distinct(parsed.concurrency)
    ]


def check_steps(side: Side, result: dict[str, Any], kept: int) -> None:
    """Check that all requests decoded together, verified K drafts a step, and accepted none.

    `kept`: tokens of all cells' requests. Where the cache does not hold them, prompts are read
    again in each round, between the steps.

    Raises:
        ValueError: it is otherwise, so the times would say nothing.
    """
    if result["preemptions"] or kept > result["cache_tokens"]:
        raise ValueError(PROMPTS_DROPPED.format(kept=kept, room=result["cache_tokens"]))
    k, steps = side.draft_tokens or 0, result["total_output_tokens"] - result["completed"]
    names = "num_drafts", "draft_tokens", "accepted_tokens"
    drafts, verified, accepted = (result.get(f"spec_decode_{name}", 0) for name in names)
    if verified != k * drafts or accepted or (k and drafts < LEAST_DRAFTED * steps):
        raise ValueError(WRONG_DRAFTS.format(verified=verified, steps=steps, accepted=accepted))


def break_even(results: Results, load: str, count: int, side: Side) -> Rounds:
    """Return the time of a side's step / that of a plain step, [rounds]."""
    verified, plain = (results.rounds(load, count, name, STEP) for name in (side.name, PLAIN))
    return verified / plain


def break_even_tables(results: Results, load: str) -> list[Table]:
    """Make the table of a context, by number of requests and K."""
    sides = results.of_kind("beside")
    rows = []
    for count in results.settings(load):
        plain = 1000 * np.median(results.rounds(load, count, PLAIN, STEP))
        ratios = [spread(break_even(results, load, count, side)) for side in sides]
        rows.append([str(count), f"{plain:.1f} ms", *ratios])
    title = f"{load}: tokens a step must bring (1 + accepted drafts), without the drafter's own"
    title += " time; median of rounds (min - max)"
    heads = [CONCURRENCY, "a plain step", *(f"K={side.draft_tokens}" for side in sides)]
    return [Table(title, heads, rows)]
