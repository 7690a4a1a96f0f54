"""`vllm-dflash bench`: from its arguments to a comparison, and to what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.progress import Progress, progress_on

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_pair import Pair
    from vllm_dflash.tools.bench.bench_plan import Workload
    from vllm_dflash.tools.bench.comparison import Comparison

FULL = {
    "seconds": 6.0,
    "rounds": 5,
    "concurrency": [1, 2, 4, 8, 16, 32],
    "native_schedule": "tuned",
}
QUICK = FULL | {"seconds": 1.5, "rounds": 2, "concurrency": [1, 4, 16]}
OF_CONTEXTS = {"concurrency": [1, 4], "native_schedule": "none"}
CONTEXTS = (1024, 2048, 4096, 8192, 16384)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code, or raises what `cli.main` explains."""
    defaults = QUICK if parsed.quick else FULL
    if parsed.context is not None:
        parsed.context = parsed.context or CONTEXTS
        defaults = defaults | OF_CONTEXTS
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    progress = progress_on()
    if find_spec("matplotlib") is None:
        raise ValueError('it needs matplotlib: pip install "vllm-dflash[bench]"')
    comparison = _prepare(parsed, progress)
    try:
        comparison.run()
    finally:  # also where it is interrupted
        record = comparison.record
        if record.rounds_complete:
            rounds = f"{record.rounds_complete} of {record.rounds} rounds are complete."
            files = f"Written: result.json, result.md, result.png in {parsed.out}"
            print_report(record.tables, [rounds, files])
    return 0


def _prepare(parsed: argparse.Namespace, progress: Progress) -> Comparison:
    """Raises ValueError where something does not fit."""
    from vllm.platforms import current_platform

    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.tools.bench.bench_record import Record, describe
    from vllm_dflash.tools.bench.comparison import Comparison
    from vllm_dflash.tools.bench.side_engines import SideEngines
    from vllm_dflash.tools.bench.sides import make_sides
    from vllm_dflash.tools.prompts import read_prompts

    workload = _choose_workload(parsed)
    prompts = read_prompts(parsed.prompts or parsed.demo / "held_out.jsonl")
    parsed.out.mkdir(parents=True, exist_ok=True)
    max_model_len = max([parsed.max_model_len, *map(workload.room_for, workload.contexts)])
    with progress.stage("preparing the pair"):
        pair = _choose_pair(parsed, max_model_len)
        drafter = read_drafter(pair.drafter)
    progress.say(f"the pair: {pair.name}")
    runs_native = drafter.dflash2 is None or not current_platform.is_cpu()
    if not runs_native:
        progress.say("vLLM's own DFlash is left out: it runs no DFlash 2 drafters on CPUs")
    native_k = [
        k for k in sorted({*parsed.native_k}) if k <= drafter.max_draft_tokens and runs_native
    ]
    sides = make_sides(
        pair.drafter, native_k, _distinct(parsed.ours_fixed_k), _distinct(parsed.beside)
    )
    tunes = parsed.native_schedule == "tuned" and bool(native_k)
    engine: dict[str, Any] = {
        "model": pair.target,
        "max_model_len": max_model_len,
        "max_num_seqs": parsed.max_num_seqs,
        # The prompts come by again and again; in use, they would not. But where reading them is
        # not measured, it need not be done again.
        "enable_prefix_caching": bool(workload.contexts),
    }
    if parsed.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = parsed.tensor_parallel_size
    if parsed.where:
        from vllm_dflash.tools.step_times import TIMED

        engine["worker_extension_cls"] = TIMED
    at_once = max(1, len(os.sched_getaffinity(0)) // parsed.tensor_parallel_size)
    if current_platform.is_cuda():
        at_once = 1  # while one starts, vLLM measures how much memory is free
        engine["gpu_memory_utilization"] = parsed.gpu_memory_utilization / (len(sides) + tunes)
    return Comparison(
        Record(describe(sys.argv[1:], pair.name, engine, workload), sides, parsed.rounds),
        workload,
        prompts,
        SideEngines(engine, at_once, parsed.out / "logs", progress),
        parsed.warmup_rounds,
        parsed.out,
        progress,
        tune_schedule=tunes,
        where=parsed.where,
    )


def _choose_workload(parsed: argparse.Namespace) -> Workload:
    from vllm.platforms import current_platform

    from vllm_dflash.config.thread_binding import check_thread_binding
    from vllm_dflash.tools.bench.bench_plan import Workload

    workload = Workload(
        loads=() if parsed.context else _distinct(parsed.load),
        concurrency=_distinct(parsed.concurrency),
        phases=tuple(parsed.phases),
        rates=_distinct(parsed.rates),
        tokens=parsed.tokens,
        seconds=parsed.seconds,
        contexts=_distinct(parsed.context or ()),
    )
    highest = max([workload.highest_concurrency, *workload.concurrency * parsed.where])
    if highest > parsed.max_num_seqs:
        raise ValueError(
            f"the loads have up to {highest} requests in flight, the engines"
            f" take {parsed.max_num_seqs} at a time: raise --max-num-seqs."
        )
    if parsed.where and current_platform.is_cuda():
        raise ValueError(
            "--where times calls, and on a GPU a call returns before its work is done: use vLLM's"
            " profiler there (--profiler-config), or leave --where out."
        )
    check_thread_binding(parsed.tensor_parallel_size)
    return workload


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
        raise ValueError("--as-it-is is for the demo pair: any other one is not widened.")
    return with_random_drafter(pair, parsed.out) if parsed.random_drafter else pair


def _distinct(values: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
