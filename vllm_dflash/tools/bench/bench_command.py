"""`vllm-dflash bench`: from its arguments to a comparison, and to what it prints."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.bench.bench_arguments import (
    CONTEXTS,
    FAILED,
    NO_SCHEDULE,
    TUNED,
    add_bench_parser,
)
from vllm_dflash.tools.console import INTERRUPTED, complain, print_report
from vllm_dflash.tools.progress import progress_on

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_pair import Pair
    from vllm_dflash.tools.bench.bench_record import Record
    from vllm_dflash.tools.bench.compare_sides import Comparison

ALWAYS: dict[str, Any] = {"native_schedule": TUNED, "context": ()}
FULL = ALWAYS | {"seconds": 6.0, "rounds": 5, "concurrency": [1, 2, 4, 8, 16, 32]}
QUICK = ALWAYS | {"seconds": 1.5, "rounds": 2, "concurrency": [1, 4, 16]}
OF_CONTEXTS: dict[str, Any] = {"concurrency": [1, 4], "native_schedule": NO_SCHEDULE}
EXTRA_MISSING = 'vllm-dflash bench needs matplotlib: pip install "vllm-dflash[bench]"'


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    add_bench_parser(commands).set_defaults(run=run_bench)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code."""
    defaults = QUICK if parsed.quick else FULL
    if parsed.context is not None:
        parsed.context = parsed.context or CONTEXTS
        defaults = defaults | OF_CONTEXTS
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    if parsed.simulate_costs:
        return _simulate(parsed)
    if find_spec("matplotlib") is None:
        return _fail(EXTRA_MISSING)
    from vllm_dflash.tools.bench.bench_files import tables_of
    from vllm_dflash.tools.engine_process import EngineDied

    record: Record | None = None
    code = 0
    try:
        comparison = _prepare(parsed)
        record = comparison.record
        comparison.run()
    except KeyboardInterrupt:
        complain("bench", "interrupted")
        code = INTERRUPTED
    except (OSError, EngineDied, ValueError) as error:
        code = _fail(str(error))
    if record is not None and record.rounds_complete:
        notes = (
            [f"{record.rounds_complete} of {record.rounds} rounds are complete."] if code else []
        )
        files = ["result.json", "result.md", "result.png"] + ["where.png"] * bool(record.where)
        notes.append(f"Written: {', '.join(files)} in {parsed.out}")
        print_report(tables_of(record), notes)
    return code


def _simulate(parsed: argparse.Namespace) -> int:
    from vllm_dflash.tools.simulate.simulate_command import simulate

    try:
        tables, notes = simulate(parsed, progress_on())
    except KeyboardInterrupt:
        complain("bench", "interrupted")
        return INTERRUPTED
    except (OSError, ValueError) as error:
        return _fail(str(error))
    print_report(tables, notes)
    return 0


def _prepare(parsed: argparse.Namespace) -> Comparison:
    """Raises ValueError where something does not fit."""
    from vllm.platforms import current_platform

    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.config.thread_binding import check_thread_binding
    from vllm_dflash.tools.bench.bench_plan import Workload
    from vllm_dflash.tools.bench.bench_record import Record, describe
    from vllm_dflash.tools.bench.compare_sides import Comparison
    from vllm_dflash.tools.bench.side_engines import SideEngines
    from vllm_dflash.tools.bench.sides import make_sides, schedule_side
    from vllm_dflash.tools.prompts import read_prompts
    from vllm_dflash.tools.step_times import TIMED

    workload = Workload(
        loads=() if parsed.context else _distinct(parsed.load),
        concurrency=_distinct(parsed.concurrency),
        phases=tuple(parsed.phases),
        rates=_distinct(parsed.rates),
        tokens=parsed.tokens,
        seconds=parsed.seconds,
        contexts=_distinct(parsed.context),
    )
    where = workload.concurrency if parsed.where else ()
    highest = max([workload.highest_concurrency, *where])
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
    progress = progress_on()
    prompts = read_prompts(parsed.prompts or parsed.demo / "held_out.jsonl")
    parsed.out.mkdir(parents=True, exist_ok=True)
    max_model_len = max([parsed.max_model_len, *map(workload.room_for, workload.contexts)])
    with progress.stage("preparing the pair"):
        pair = _choose_pair(parsed, max_model_len, max(workload.contexts, default=0))
        drafter = read_drafter(pair.drafter)
        longest = drafter.max_draft_tokens
    progress.say(f"the pair: {pair.name}")
    runs_native = drafter.dflash2 is None or not current_platform.is_cpu()
    if not runs_native:
        progress.say("vLLM's own DFlash is left out: it runs no DFlash 2 drafters on CPUs")
    engine = {
        "model": pair.target,
        "max_model_len": max_model_len,
        "max_num_seqs": parsed.max_num_seqs,
        # The prompts come by again and again; in use, they would not. But where reading them is
        # not measured, it need not be done again.
        "enable_prefix_caching": bool(workload.contexts),
    }
    if parsed.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = parsed.tensor_parallel_size
    native_k = [k for k in sorted({*parsed.native_k}) if k <= longest and runs_native]
    sides = make_sides(
        pair.drafter, native_k, _distinct(parsed.ours_fixed_k), _distinct(parsed.beside)
    )
    ranges = parsed.native_schedule
    if isinstance(ranges, list) and runs_native:
        sides.insert(1 + len(native_k), schedule_side(pair.drafter, ranges, longest))
    tunes = ranges == TUNED and bool(native_k)
    at_once = max(1, len(os.sched_getaffinity(0)) // parsed.tensor_parallel_size)
    if parsed.where:
        engine["worker_extension_cls"] = TIMED
    if current_platform.is_cuda():
        at_once = 1  # while one starts, vLLM measures how much memory is free
        engine["gpu_memory_utilization"] = parsed.gpu_memory_utilization / (len(sides) + tunes)
    record = Record(
        about=describe(sys.argv[1:], pair.name, engine, workload),
        sides=sides,
        rounds=parsed.rounds,
    )
    return Comparison(
        record,
        workload,
        prompts,
        SideEngines(engine, at_once, parsed.out / "logs", progress),
        parsed.warmup_rounds,
        parsed.out,
        progress,
        tune_schedule=tunes,
        where=parsed.where,
    )


def _choose_pair(parsed: argparse.Namespace, positions: int, context: int) -> Pair:
    from vllm_dflash.tools.bench.bench_pair import Pair, demo_pair, with_random_drafter

    if (parsed.target is None) != (parsed.drafter is None):
        raise ValueError("--target and --drafter belong together.")
    if parsed.target is None:
        pair = demo_pair(
            parsed.demo,
            parsed.out,
            as_it_is=parsed.as_it_is,
            positions=positions,
            context=context,
        )
    elif parsed.as_it_is:
        raise ValueError("--as-it-is is for the demo pair: any other one is not widened.")
    else:
        pair = Pair(parsed.target, parsed.drafter, f"{parsed.target} and {parsed.drafter}")
    return with_random_drafter(pair, parsed.out) if parsed.random_drafter else pair


def _distinct(values: list[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _fail(message: str) -> int:
    complain("bench", message)
    return FAILED
