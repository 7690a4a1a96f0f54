"""`vllm-dflash bench`: its arguments, and from them to a comparison."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.arguments import add_number, positive, share
from vllm_dflash.tools.console import INTERRUPTED, complain, print_report
from vllm_dflash.tools.progress import progress_on

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_pair import Pair
    from vllm_dflash.tools.bench.bench_record import Record
    from vllm_dflash.tools.bench.compare_sides import Comparison

LOADS = {
    "closed": "a fixed number of requests in flight",
    "mixed": "the same, every other prompt with its words shuffled, so hard to draft for",
    "swing": "a number of requests in flight that changes from phase to phase",
    "poisson": "requests that arrive at random moments, half of them hard to draft for",
}
FULL: dict[str, Any] = {"seconds": 6.0, "rounds": 5, "concurrency": [1, 2, 4, 8, 16, 32]}
QUICK: dict[str, Any] = {"seconds": 1.5, "rounds": 2, "concurrency": [1, 4, 16]}
EXTRA_MISSING = 'vllm-dflash bench needs matplotlib: pip install "vllm-dflash[bench]"'
FAILED = 2
TUNED, NO_SCHEDULE = "tuned", "none"


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    loads = "\n".join(f"  {name:8} {meaning}" for name, meaning in LOADS.items())
    parser = commands.add_parser(
        "bench",
        help="measure plain decoding, vLLM's own DFlash and ours side by side",
        description="Measure plain decoding, vLLM's own DFlash at several fixed K, and ours, which"
        " chooses how much to draft.\nAll engines live side by side; every round measures each of"
        " them once under each load.",
        epilog=f"what the loads are:\n{loads}\n\n"
        "examples:\n"
        "  vllm-dflash bench --quick\n"
        "  vllm-dflash bench --load closed swing --native-k 3 7 --rounds 9\n"
        "  vllm-dflash bench --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\\n"
        "      --prompts prompts.jsonl\n\n"
        f"exit code 0: measured, {FAILED}: could not run, {INTERRUPTED}: interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = parser.add_argument_group("pair")
    pair.add_argument("--target", help="folder or repository of the target; needs --drafter")
    pair.add_argument("--drafter", help="folder or repository of the drafter")
    pair.add_argument(
        "--demo",
        type=Path,
        nargs="?",
        const=Path("models/demo"),
        default=Path("models/demo"),
        metavar="FOLDER",
        help="without --target: the repository's demo pair, widened so that it costs as much as a"
        " larger one (default: models/demo)",
    )
    pair.add_argument(
        "--random-drafter",
        action="store_true",
        help="fill a copy of the drafter with noise: what do useless drafts cost?",
    )
    pair.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": "..."} (default: held_out.jsonl of the demo pair)',
    )
    sides = parser.add_argument_group("engines")
    sides.add_argument(
        "--native-k",
        type=positive,
        nargs="*",
        default=[1, 3, 5, 7],
        metavar="K",
        help="draft lengths of vLLM's own DFlash, an engine each (default: 1 3 5 7, as far as the"
        " drafter's block goes)",
    )
    sides.add_argument(
        "--native-schedule",
        type=_schedule,
        default=TUNED,
        metavar="RANGES",
        help="vLLM's own DFlash with num_speculative_tokens_per_batch_size, as in"
        " [[1,4,3],[5,64,0]], or none (default: tuned, the K among those of --native-k, or no"
        " drafts, that is fastest at each concurrency when it is tried for a moment)",
    )
    sides.add_argument(
        "--ours-fixed-k",
        type=positive,
        nargs="*",
        default=[],
        metavar="K",
        help="measure ours at these fixed draft lengths, too",
    )
    add_number(sides, "--max-model-len", 1024, "of every engine")
    add_number(sides, "--max-num-seqs", 64, "of every engine")
    add_number(sides, "--tensor-parallel-size", 1, "ranks of every engine")
    sides.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory, for all engines together: each gets the same part (default: 0.9)",
    )
    load = parser.add_argument_group("measurements")
    load.add_argument(
        "--load",
        nargs="+",
        metavar="LOAD",
        choices=LOADS,
        default=["closed"],
        help="(default: closed)",
    )
    load.add_argument(
        "--concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="of closed and mixed (default: 1 2 4 8 16 32)",
    )
    load.add_argument(
        "--phases",
        type=positive,
        nargs="+",
        default=[1, 32, 4, 16, 1, 32, 8, 2],
        metavar="N",
        help="requests in flight in each phase of swing (default: 1 32 4 16 1 32 8 2)",
    )
    load.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[0.3, 0.6, 0.9],
        metavar="X",
        help="arrivals of poisson, as fractions of what plain decoding can serve, 16 requests at a"
        " time (default: 0.3 0.6 0.9)",
    )
    add_number(load, "--tokens", 96, "new tokens a request")
    load.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="length of a measurement; of a phase of swing, and a third of poisson's, as long as"
        " plain decoding takes (default: 6)",
    )
    load.add_argument("--rounds", type=positive, metavar="N", help="(default: 5)")
    load.add_argument(
        "--warmup-rounds",
        type=int,
        default=1,
        metavar="N",
        help="rounds that do not count: kernels are prepared when a batch of a new size first"
        " comes by (default: 1)",
    )
    load.add_argument(
        "--quick",
        action="store_true",
        help="windows of 1.5 s, 2 rounds, concurrency 1 4 16, where not said otherwise",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/bench"),
        metavar="FOLDER",
        help="for result.json, result.md, result.png and logs (default: out/bench)",
    )
    parser.set_defaults(run=run_bench)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code."""
    for name, value in (QUICK if parsed.quick else FULL).items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
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
        notes.append(f"Written: result.json, result.md and result.png in {parsed.out}")
        print_report(tables_of(record), notes)
    return code


def _prepare(parsed: argparse.Namespace) -> Comparison:
    """Raises ValueError where something does not fit."""
    from vllm.platforms import current_platform

    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.config.thread_binding import check_thread_binding
    from vllm_dflash.tools.bench.bench_plan import Workload
    from vllm_dflash.tools.bench.bench_record import Record, describe
    from vllm_dflash.tools.bench.compare_sides import Comparison
    from vllm_dflash.tools.bench.sides import make_sides, schedule_side
    from vllm_dflash.tools.prompts import read_prompts

    workload = Workload(
        loads=_distinct(parsed.load),
        concurrency=_distinct(parsed.concurrency),
        phases=tuple(parsed.phases),
        rates=_distinct(parsed.rates),
        tokens=parsed.tokens,
        seconds=parsed.seconds,
    )
    if workload.highest_concurrency > parsed.max_num_seqs:
        raise ValueError(
            f"the loads have up to {workload.highest_concurrency} requests in flight, the engines"
            f" take {parsed.max_num_seqs} at a time: raise --max-num-seqs."
        )
    check_thread_binding(parsed.tensor_parallel_size)
    progress = progress_on()
    prompts = read_prompts(parsed.prompts or parsed.demo / "held_out.jsonl")
    parsed.out.mkdir(parents=True, exist_ok=True)
    with progress.stage("preparing the pair"):
        pair = _choose_pair(parsed)
        longest = read_drafter(pair.drafter).max_draft_tokens
    engine = {
        "model": pair.target,
        "max_model_len": parsed.max_model_len,
        "max_num_seqs": parsed.max_num_seqs,
        # The prompts come by again and again; in use, they would not.
        "enable_prefix_caching": False,
    }
    if parsed.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = parsed.tensor_parallel_size
    native_k = [k for k in sorted({*parsed.native_k}) if k <= longest]
    sides = make_sides(pair.drafter, native_k, _distinct(parsed.ours_fixed_k))
    ranges = parsed.native_schedule
    if isinstance(ranges, list):
        sides.insert(1 + len(native_k), schedule_side(pair.drafter, ranges, longest))
    tunes = ranges == TUNED and bool(native_k)
    if current_platform.is_cuda():
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
        engine,
        parsed.warmup_rounds,
        parsed.out,
        progress,
        tune_schedule=tunes,
    )


def _choose_pair(parsed: argparse.Namespace) -> Pair:
    from vllm_dflash.tools.bench.bench_pair import Pair, widened_demo, with_random_drafter

    if (parsed.target is None) != (parsed.drafter is None):
        raise ValueError("--target and --drafter belong together.")
    if parsed.target is None:
        pair = widened_demo(parsed.demo, parsed.out)
    else:
        pair = Pair(parsed.target, parsed.drafter, f"{parsed.target} and {parsed.drafter}")
    return with_random_drafter(pair, parsed.out) if parsed.random_drafter else pair


def _schedule(text: str) -> str | list[list[int]]:
    """`tuned`, `none`, or ranges; vLLM itself says what is wrong with their numbers."""
    if text in (TUNED, NO_SCHEDULE):
        return text
    try:
        ranges = json.loads(text)
    except ValueError:
        ranges = None
    if not (ranges and isinstance(ranges, list) and all(_is_range(one) for one in ranges)):
        raise argparse.ArgumentTypeError(
            f"expected tuned, none, or ranges such as [[1,4,3],[5,64,0]], not {text}"
        )
    return ranges


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int, int, int]


def _distinct(values: list[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _fail(message: str) -> int:
    complain("bench", message)
    return FAILED
