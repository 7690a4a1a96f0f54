"""`vllm-dflash bench`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from vllm_dflash.tools.arguments import (
    add_folder,
    add_models,
    add_number,
    add_numbers,
    add_prompts,
    json_object,
    not_negative,
    positive,
    share,
    whole,
)
from vllm_dflash.tools.bench.sides import BLOCKS, LOOK_UPS
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, print_report
from vllm_dflash.tools.demo_files import demo_folder
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.vllms_own import OWN_KEYS

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_runs import Comparison

FULL: dict[str, Any] = {"rounds": 5, "concurrency": [1, 2, 4, 8, 16, 32], "output_len": 96}
QUICK = FULL | {"rounds": 2, "concurrency": [1, 4, 16]}
OF_DATASETS = {"rounds": 2, "concurrency": [1, 8], "output_len": None, "num_prompts": 80}
OF_STEPS = FULL | {"rounds": 3, "concurrency": [1, 4, 16], "context": [128, 1024]}
"""Defaults of the arguments with these names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of the command."""
    add_pair_and_prompts(parser)
    add_sides(parser)
    add_measurements(parser)
    add_break_even(parser)
    about = "folder for result.json, result.md, result.png, raw results and logs"
    add_folder(parser, "--out", "out/bench", about)


def set_defaults(parsed: argparse.Namespace) -> None:
    """Set what the user left out."""
    defaults = QUICK if parsed.quick else FULL
    if parsed.break_even is not None:
        defaults = OF_STEPS
    elif parsed.dataset_name is not None:
        defaults = OF_DATASETS
    for name, value in defaults.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def beside(written: str) -> str:
    """Check a value of `--beside`: a name, or JSON of our options. Raises `ArgumentTypeError`."""
    names = BLOCKS, *LOOK_UPS
    if written in names:
        return written
    if not written.startswith("{"):
        raise argparse.ArgumentTypeError(f"{written} is none of {', '.join(names)}")
    options = json_object(written)
    if unknown := {*options} - {*OWN_KEYS, "num_speculative_tokens"}:
        raise argparse.ArgumentTypeError(f"not options of ours: {', '.join(sorted(unknown))}")
    return json.dumps(options)


def add_pair_and_prompts(parser: argparse.ArgumentParser) -> None:
    """Add the pair and its prompts."""
    pair = parser.add_argument_group("pair")
    add_models(pair)
    about = "with several files, each is measured"
    add_prompts(pair, f"held_out.jsonl of the demo pair; {about}", nargs="+")
    about = "small pair to use without --target, widened to the cost of a larger one"
    add_folder(pair, "--demo", str(demo_folder()), about)


def add_sides(parser: argparse.ArgumentParser) -> None:
    """Add the servers."""
    sides = parser.add_argument_group("servers")
    about = "draft lengths of vLLM's own DFlash, one server each, up to the drafter's maximum"
    add_numbers(sides, "--native-k", [1, 3, 5, 7], about)
    sides.add_argument(
        "--beside",
        nargs="+",
        type=beside,
        default=[],
        metavar="SERVER",
        help="additional servers: ours with other options, as JSON ('{\"draft_window\": 256}'),"
        " blocks (ours without free drafts), ngram and suffix (vLLM's methods, which look up drafts"
        " in the text; suffix needs arctic-inference)",
    )
    add_number(sides, "--max-model-len", 1024, "maximum tokens per request in every server")
    add_number(sides, "--max-num-seqs", 64, "maximum requests at a time in every server")
    about = "dtype of every server (default: the model's, or float32 on CPUs without bfloat16)"
    sides.add_argument("--dtype", help=about)
    about = "share of a GPU's memory, divided equally among all servers (default: 0.9)"
    sides.add_argument(
        "--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help=about
    )
    about = "flags of `vllm serve` for every server, after --, such as --enforce-eager (servers"
    about += " start sooner, but are slower than in production), --tensor-parallel-size or"
    about += " --kv-cache-memory-bytes (with it, servers on a GPU start at the same time)"
    sides.add_argument("flags", nargs="*", metavar="-- FLAGS", help=about)


def add_measurements(parser: argparse.ArgumentParser) -> None:
    """Add what is measured, and how often; names are those of `vllm bench serve` if it has them."""
    group = parser.add_argument_group("measurements")
    add = group.add_argument
    about = "requests in flight (default: 1 2 4 8 16 32; with --dataset-name: 1 8)"
    add("--concurrency", type=positive, nargs="+", metavar="N", help=about)
    about = "prompts of a measurement (default: three for each request in flight, at least 4; with"
    add("--num-prompts", type=positive, metavar="N", help=f"{about} --dataset-name: 80)")
    about = "maximum new tokens per request (default: 96; with --dataset-name: vLLM's for the set)"
    add("--output-len", "--tokens", type=positive, metavar="N", help=about)
    about = "temperatures to measure at (default: 0)"
    add("--temperature", type=not_negative, nargs="+", default=[0.0], metavar="T", help=about)
    add("--ignore-eos", action="store_true", help="continue every answer to its maximum length")
    about = "measure prompts of a set of `vllm bench serve` instead, such as spec_bench or custom"
    add("--dataset-name", metavar="NAME", help=about)
    about = "the set's file, or its name on Hugging Face with --dataset-name hf"
    add("--dataset-path", metavar="PATH", help=about)
    about = 'chat template arguments for the set, such as {"enable_thinking": false}'
    add("--chat-template-kwargs", type=json_object, metavar="JSON", help=about)
    about = "use the set's prompts without the chat template"
    add("--skip-chat-template", action="store_true", help=about)
    about = "rounds to measure (default: 5; with --dataset-name: 2)"
    add("--rounds", type=positive, metavar="N", help=about)
    about = "rounds to discard, since kernels are prepared at the first batch of each size"
    about = f"{about} (default: 1)"
    add("--warmup-rounds", type=whole, default=1, metavar="N", help=about)
    about = "use faster defaults: 2 rounds, concurrency 1 4 16"
    add("--quick", action="store_true", help=about)


def add_break_even(parser: argparse.ArgumentParser) -> None:
    """Add the measurement that needs no drafter."""
    group = parser.add_argument_group("break-even")
    about = "only time steps of the target that verify K drafts, and plain ones: how many tokens a"
    about += " step must bring on this machine (default K: 3 7 15; concurrency 1 4 16, 3 rounds,"
    about += " steps of answers of --output-len tokens)"
    group.add_argument("--break-even", type=positive, nargs="*", metavar="K", help=about)
    about = "tokens of each request before these steps (default: 128 1024)"
    group.add_argument("--context", type=positive, nargs="+", metavar="N", help=about)


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
