"""What do workers in Ray actors cost beside vLLM's own processes? TP=2, DFlash, one machine.

    scripts/run.sh python benchmarks/ray_overhead.py

Three engines run side by side on the same two halves of this machine's cores: multiprocessing, our
Ray executor with both workers on one node (shared memory), and with one on each of two nodes (TCP
on loopback). Every round measures each once at each concurrency, at a fixed draft length. Takes
about five minutes.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.progress import track

from demo_models import DEMO, HELD_OUT
from paired_rates import Measured, rates_table, write_rates
from vllm_dflash.config.engine_options import CPU_RAY_EXECUTOR
from vllm_dflash.tools.bench.sides import side_environment
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.prompts import read_prompts

ROOT = Path(__file__).parent.parent
BINDING = "VLLM_CPU_OMP_THREADS_BIND"
SIDES = ("processes", "ray, one node", "ray, two nodes")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", type=Path, default=DEMO, help="folder with target/ and drafter/")
    add("--prompts", type=Path, default=HELD_OUT)
    add("--concurrency", type=int, nargs="+", default=[1, 8])
    add("--rounds", type=int, default=5)
    add("--warmup-rounds", type=int, default=1)
    add("--seconds", type=float, default=2.5, help="of each measurement")
    add("--tokens", type=int, default=96, help="of each request")
    add("--eager", action="store_true", help="do not compile: starts sooner, runs slower")
    add("--out", type=Path, default=Path("out/ray_overhead"))
    return parser.parse_args()


def main() -> None:
    """Run the benchmark and print a table."""
    arguments = parse()
    prompts = read_prompts(arguments.prompts, 200)
    measured: Measured = {}
    with ExitStack() as stack:
        children = start(stack, arguments)
        for child in track(children.values(), "Starting engines"):
            child.answers.facts()
        schedule = [
            (number, concurrency, side)
            for number in range(-arguments.warmup_rounds, arguments.rounds)
            for concurrency in arguments.concurrency
            for side in SIDES
        ]
        for number, concurrency, side in track(schedule, "Measuring"):
            result = children[side].answers.closed(
                prompts=prompts,
                concurrency=concurrency,
                tokens=arguments.tokens,
                seconds=arguments.seconds,
            )
            if number >= 0:
                measured.setdefault((concurrency, side), []).append(result["tokens_per_second"])
        for child in children.values():
            child.dismiss()
    title = f"Tokens/s, TP=2, medians of {arguments.rounds} interleaved rounds"
    preloaded = f"LD_PRELOAD: {os.environ.get('LD_PRELOAD') or 'nothing'}"
    print_report([rates_table(title, SIDES, measured)], [preloaded])
    write_rates(measured, arguments.out / "result.json")


def start(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, EngineProcess]:
    """Start the three engines, and the Ray clusters of two of them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.ray_cluster import ray_cluster

    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if not half:
        raise SystemExit("this benchmark needs two cores: its two workers compute on one half each")
    first, second = (",".join(map(str, part)) for part in (cores[:half], cores[half : 2 * half]))
    both = f"{first}|{second}"
    together = stack.enter_context(ray_cluster(cpus=2 * half, **{BINDING: both}))
    apart = stack.enter_context(ray_cluster(cpus=half, **{BINDING: first}))
    stack.enter_context(apart.joined("127.0.0.3", cpus=half, **{BINDING: second}))
    engine = {
        "model": str(arguments.pair / "target"),
        "speculative_config": {
            "method": "dflash",
            "model": str(arguments.pair / "drafter"),
            "draft_length": "fixed",
        },
        "tensor_parallel_size": 2,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "enable_prefix_caching": False,
        "enforce_eager": arguments.eager,
    }
    places = {
        "processes": ("mp", {BINDING: both}),
        "ray, one node": (CPU_RAY_EXECUTOR, together.access),
        "ray, two nodes": (CPU_RAY_EXECUTOR, apart.access),
    }
    return {
        side: stack.enter_context(
            EngineProcess(
                arguments.out / f"{side}.log",
                environment=side_environment() | variables,
                distributed_executor_backend=backend,
                **engine,
            )
        )
        for side, (backend, variables) in places.items()
    }


if __name__ == "__main__":
    main()
