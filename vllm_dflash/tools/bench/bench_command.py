"""`vllm-dflash bench`: runs a comparison and prints the tables."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_dflash.tools.bench.bench_arguments import add_arguments, set_defaults
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, print_report
from vllm_dflash.tools.progress import progress_on

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.comparison import Comparison

ABOUT = """Measure plain decoding, vLLM's own DFlash at several fixed K, and ours.
All servers stay up for the whole run; each round measures everything once on each of them
with the client of `vllm bench serve`."""
EPILOG = """examples:
  vllm-dflash bench --quick
  vllm-dflash bench --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts code.jsonl chat.jsonl --temperature 0 0.7
  vllm-dflash bench --native-k 3 7 --beside blocks ngram '{{"draft_tree": "auto"}}' --rounds 9
  vllm-dflash bench --break-even 3 7 --target Qwen/Qwen3-8B
  vllm-dflash bench --dataset-name spec_bench --dataset-path question.jsonl --native-k 3

exit code: 0 success, {failed} could not run, {interrupted} or 143 interrupted"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure plain decoding, vLLM's own DFlash and ours side by side",
        description=ABOUT,
        epilog=EPILOG.format(failed=COULD_NOT_RUN, interrupted=INTERRUPTED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=run_bench)


def run_bench(parsed: argparse.Namespace) -> int:
    """Measure and print tables. Returns the exit code; `cli.main` reports what this raises."""
    from vllm_dflash.tools.bench.bench_setup import compare_sides
    from vllm_dflash.tools.bench.break_even import compare_steps

    set_defaults(parsed)
    if parsed.break_even is not None:
        return run_and_report(compare_steps(parsed, progress_on()))
    if parsed.context:
        raise ValueError("--context needs --break-even.")
    return run_and_report(compare_sides(parsed, progress_on()))


def run_and_report(comparison: Comparison) -> int:
    """Run a comparison and print its tables, also if it is interrupted. Returns the exit code."""
    record = comparison.record
    try:
        comparison.run()
    finally:
        if record.rounds_complete:
            note = f"{record.rounds_complete} of {record.rounds} rounds are complete."
            print_report(record.tables, [note])
    print(f"Written: result.json, result.md{', result.png' * record.plots} in {comparison.out}")
    return 0
