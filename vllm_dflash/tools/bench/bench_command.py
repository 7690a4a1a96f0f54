"""`vllm-dflash bench`: sets up a comparison from its arguments, runs it and prints the tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.bench.bench_arguments import (
    CONTEXTS,
    FULL,
    OF_CONTEXTS,
    OF_DATASETS,
    QUICK,
    add_arguments,
)
from vllm_dflash.tools.bench.bench_datasets import given_dataset
from vllm_dflash.tools.bench.bench_plan import CLOSED_LOADS, LOADS, Workload
from vllm_dflash.tools.bench.sides import SideEngines, make_sides
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, print_report
from vllm_dflash.tools.default_dtype import choose_dtype
from vllm_dflash.tools.progress import Progress, progress_on
from vllm_dflash.tools.prompts import read_prompts
from vllm_dflash.tools.step_times import TIMED

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_pair import Pair
    from vllm_dflash.tools.bench.comparison import Comparison

EPILOG = """loads:
{loads}

examples:
  vllm-dflash bench --quick
  vllm-dflash bench --load closed swing --native-k 3 7 --rounds 9
  vllm-dflash bench --load edit quote prose --beside blocks ngram --native-k 3
  vllm-dflash bench --load short arrivals --native-k 3 --seconds 60 --rounds 4
  vllm-dflash bench --where --native-k 3 --concurrency 1 8
  vllm-dflash bench --context 1024 4096 16384 --native-k 3 --as-it-is
  vllm-dflash bench --dataset-name spec_bench --dataset-path question.jsonl --native-k 3
  vllm-dflash bench --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts prompts.jsonl

exit code: 0 success, {failed} could not run, {interrupted} or 143 interrupted"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    loads = "\n".join(f"  {name:8} {meaning}" for name, meaning in LOADS.items())
    parser = commands.add_parser(
        "bench",
        help="measure plain decoding, vLLM's own DFlash and ours side by side",
        description="Measure plain decoding, vLLM's own DFlash at several fixed K, and ours.\nAll"
        " engines stay up for the whole run; each round measures every load once on each engine.",
        epilog=EPILOG.format(loads=loads, failed=COULD_NOT_RUN, interrupted=INTERRUPTED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run_bench)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code; `cli.main` reports what this raises."""
    defaults = QUICK if parsed.quick else FULL
    if parsed.context is not None:
        parsed.context = parsed.context or CONTEXTS
        defaults = defaults | OF_CONTEXTS
    if parsed.dataset_name is not None:
        defaults = defaults | OF_DATASETS
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    progress = progress_on()
    comparison = _prepare(parsed, progress)
    try:
        comparison.run()
    finally:  # also when interrupted
        record = comparison.record
        if record.rounds_complete:
            rounds = f"{record.rounds_complete} of {record.rounds} rounds are complete."
            files = f"Written: result.json, result.md and result.png in {parsed.out}"
            if find_spec("matplotlib") is None:
                files = f"Written: result.json and result.md in {parsed.out} (pip install"
                files += " matplotlib for a plot)"
            print_report(record.tables, [rounds, files])
    return 0


def _prepare(parsed: argparse.Namespace, progress: Progress) -> Comparison:
    """Build the comparison. Raises ValueError for arguments that do not fit each other."""
    from vllm.platforms import current_platform

    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.tools.bench.bench_record import Record, describe
    from vllm_dflash.tools.bench.comparison import Comparison

    workload = _choose_workload(parsed)
    dataset = given_dataset(parsed)
    if dataset is None:
        files = _distinct(parsed.prompts or [parsed.demo / "held_out.jsonl"])
        prompts = dict(zip(workload.files, map(read_prompts, files), strict=True))
    else:
        prompts = {"": [str(one.prompt) for one in dataset.requests]}
    parsed.out.mkdir(parents=True, exist_ok=True)
    max_model_len = max([parsed.max_model_len, *map(workload.room_for, workload.contexts)])
    with progress.stage("preparing the pair"):
        pair = _choose_pair(parsed, max_model_len)
        drafter = read_drafter(pair.drafter)
    progress.say(f"the pair: {pair.name}")
    native_k = [k for k in sorted({*parsed.native_k}) if k <= drafter.max_draft_tokens]
    if drafter.num_candidates is not None and current_platform.is_cpu():
        progress.say("vLLM's own DFlash is left out: it does not support this drafter on CPUs")
        native_k = []
    ours_k, beside = _distinct(parsed.ours_fixed_k), _distinct(parsed.beside)
    sides = make_sides(pair.drafter, native_k, ours_k, beside)
    tunes = parsed.native_schedule == "tuned" and bool(native_k)
    engine: dict[str, Any] = {
        "model": pair.target,
        "max_model_len": max_model_len,
        "max_num_seqs": parsed.max_num_seqs,
        # Off because prompts are repeated, unlike in production; on if prefill is not measured.
        "enable_prefix_caching": bool(workload.contexts),
        **choose_dtype(parsed.dtype, progress, pair.target),
    }
    if parsed.enforce_eager:
        engine["enforce_eager"] = True
    if parsed.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = parsed.tensor_parallel_size
    if workload.where:
        engine["worker_extension_cls"] = TIMED
    at_once = max(1, len(os.sched_getaffinity(0)) // parsed.tensor_parallel_size)
    if current_platform.is_cuda():
        engine["gpu_memory_utilization"] = parsed.gpu_memory_utilization / (len(sides) + tunes)
        if parsed.kv_cache_memory_bytes is None:
            at_once = 1  # an engine measures free memory while it starts
    if parsed.kv_cache_memory_bytes is not None:
        engine["kv_cache_memory_bytes"] = parsed.kv_cache_memory_bytes
    return Comparison(
        Record(describe(sys.argv[1:], pair.name, engine, workload), sides, parsed.rounds),
        workload,
        prompts,
        SideEngines(engine, at_once, parsed.out / "logs"),
        parsed.out,
        progress,
        warmup_rounds=parsed.warmup_rounds,
        tune_schedule=tunes,
        dataset=dataset,
    )


def _choose_workload(parsed: argparse.Namespace) -> Workload:
    from vllm.platforms import current_platform

    from vllm_dflash.config.thread_binding import check_thread_binding

    workload = Workload(
        loads=() if parsed.context or parsed.dataset_name else _distinct(parsed.load),
        concurrency=_distinct(parsed.concurrency),
        phases=tuple(parsed.phases),
        tokens=parsed.tokens,
        seconds=parsed.seconds,
        contexts=_distinct(parsed.context or ()),
        shares=_distinct(parsed.shares),
        where=parsed.where,
        temperatures=_distinct(parsed.temperature),
        ignore_eos=parsed.ignore_eos,
        files=_file_names(_distinct(parsed.prompts or [])),
    )
    others = {*(workload.loads or ["--context"])} - {*CLOSED_LOADS}
    if others and not parsed.dataset_name and any(workload.temperatures):
        raise ValueError(
            f"--temperature is for {', '.join(CLOSED_LOADS)} and sets of prompts, not for"
            f" {', '.join(sorted(others))}."
        )
    if workload.highest_concurrency > parsed.max_num_seqs:
        raise ValueError(
            f"the loads have up to {workload.highest_concurrency} requests in flight, but the"
            f" engines take {parsed.max_num_seqs} at a time: raise --max-num-seqs."
        )
    if workload.where and current_platform.is_cuda():
        raise ValueError(
            "--where does not work on a GPU, where calls return before their work is done: use"
            " vLLM's profiler (--profiler-config), or leave --where out."
        )
    if workload.where and parsed.dataset_name:
        raise ValueError("--where is for loads and contexts, not for sets of prompts.")
    if parsed.native_schedule == "tuned" and parsed.dataset_name:
        raise ValueError("--native-schedule tuned is for loads, not for sets of prompts.")
    check_thread_binding(parsed.tensor_parallel_size)
    return workload


def _file_names(files: Sequence[Path]) -> tuple[str, ...]:
    """Return distinct names for the files: their stems if possible; empty for a single file."""
    if len(files) < 2:
        return ("",)
    stems = [file.stem for file in files]
    is_clear = len({*stems}) == len(stems)
    return tuple(stems if is_clear else map(str, files))


def _choose_pair(parsed: argparse.Namespace, positions: int) -> Pair:
    from vllm_dflash.tools.bench.bench_pair import demo_pair, given_pair, with_random_drafter

    pair = given_pair(parsed.target, parsed.drafter)
    if pair is None:
        context = max(parsed.context or [0])
        as_it_is = parsed.as_it_is
        pair = demo_pair(
            parsed.demo, parsed.out, as_it_is=as_it_is, positions=positions, context=context
        )
    elif parsed.as_it_is:
        raise ValueError("--as-it-is is for the demo pair; other pairs are never widened.")
    return with_random_drafter(pair, parsed.out) if parsed.random_drafter else pair


def _distinct(values: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
