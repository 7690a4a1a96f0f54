"""Measure plain decoding, vLLM's own DFlash and ours under more loads than `vllm-dflash bench`.

    scripts/run.sh python benchmarks/loads --load closed swing --native-k 3 7 --rounds 9
    scripts/run.sh python benchmarks/loads --load edit quote prose --beside blocks ngram
    scripts/run.sh python benchmarks/loads --load short arrivals --native-k 3 --seconds 60
    scripts/run.sh python benchmarks/loads --load agent --turns 8 --concurrency 1 4 --native-k 3
    scripts/run.sh python benchmarks/loads --where --native-k 3 --concurrency 1 8
    scripts/run.sh python benchmarks/loads --context 1024 4096 16384 --native-k 3 --as-it-is

Has all options of `vllm-dflash bench`, and writes the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from loads.loads_setup import LoadsSetup
from loads.workload import LOADS
from vllm_dflash.tools.arguments import add_number, add_numbers, positive
from vllm_dflash.tools.bench.bench_arguments import (
    add_models_and_prompts,
    add_out,
    add_sides,
    add_windows,
    set_defaults,
)
from vllm_dflash.tools.bench.bench_command import run_and_report
from vllm_dflash.tools.bench.bench_datasets import add_dataset
from vllm_dflash.tools.cli import run_command
from vllm_dflash.tools.progress import progress_on

OF_CONTEXTS = {"concurrency": [1, 4]}
"""Defaults of the arguments with these names."""
CONTEXTS = (1024, 2048, 4096, 8192, 16384)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print tables. Returns the exit code."""
    parsed = make_parser().parse_args(arguments)
    return run_command("loads", lambda: run_loads(parsed))


def run_loads(parsed: argparse.Namespace) -> int:
    """Set up and run what was asked for."""
    if parsed.context is None:
        set_defaults(parsed)
    else:
        parsed.context = parsed.context or CONTEXTS
        set_defaults(parsed, **OF_CONTEXTS)
    return run_and_report(LoadsSetup(parsed, progress_on()).comparison())


def make_parser() -> argparse.ArgumentParser:
    """Make the parser: the options of `vllm-dflash bench`, and more."""
    loads = "\n".join(f"  {name:8} {meaning}" for name, meaning in LOADS.items())
    parser = argparse.ArgumentParser(
        prog="loads",
        description=__doc__,
        epilog=f"loads:\n{loads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = add_models_and_prompts(parser)
    pair.add_argument(
        "--as-it-is",
        action="store_true",
        help="do not widen the demo pair (5 M and 2.6 M parameters; its steps take 2 ms)",
    )
    pair.add_argument(
        "--random-drafter",
        action="store_true",
        help="replace the drafter's weights with random ones, to measure what useless drafts cost",
    )
    add_sides(parser).add_argument(
        "--native-schedule",
        choices=("tuned", "none"),
        default="none",
        help="tuned: also measure vLLM's own DFlash with num_speculative_tokens_per_batch_size set"
        " to the fastest K of --native-k (or 0) for each concurrency, found in a short trial"
        " (default: none)",
    )
    measurements = parser.add_argument_group("measurements")
    what = measurements.add_mutually_exclusive_group()
    what.add_argument(
        "--load",
        nargs="+",
        metavar="LOAD",
        choices=LOADS,
        default=["closed"],
        help="loads to measure, listed below (default: closed). The closed ones are measured at"
        " each --temperature",
    )
    what.add_argument(
        "--context",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="instead of a load, measure only decoding after cached prompts of this many tokens"
        " (without numbers: 1024 2048 4096 8192 16384); raises --max-model-len, and the defaults"
        " are --concurrency 1 4",
    )
    add_dataset(what, measurements)
    about = "for arrivals: rates, in percent of the most requests/s that plain decoding serves"
    add_numbers(measurements, "--shares", [50, 80], about, nargs="+")
    about = "requests in flight in each phase of swing"
    add_numbers(measurements, "--phases", [1, 32, 4, 16, 1, 32, 8, 2], about, nargs="+")
    about = "for agent: turns of each conversation, of about 900 tokens each"
    add_number(measurements, "--turns", 8, about)
    add_windows(measurements)
    measurements.add_argument(
        "--where",
        action="store_true",
        help="also show where the time goes at each concurrency: milliseconds in the target,"
        " drafting, its context, planning, and the rest of the engine (CPU only)",
    )
    add_out(parser, "out/loads")
    return parser
