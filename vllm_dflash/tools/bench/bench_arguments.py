"""What `vllm-dflash bench` is told on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_dflash.tools.arguments import add_compared, add_number, add_numbers, positive, share
from vllm_dflash.tools.bench.bench_command import run_bench
from vllm_dflash.tools.bench.bench_plan import LOADS
from vllm_dflash.tools.bench.sides import BLOCKS, LOOK_UPS
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED

EPILOG = """what the loads are:
{loads}

examples:
  vllm-dflash bench --quick
  vllm-dflash bench --load closed swing --native-k 3 7 --rounds 9
  vllm-dflash bench --load edit quote prose --beside blocks ngram --native-k 3
  vllm-dflash bench --where --native-k 3 --concurrency 1 8
  vllm-dflash bench --context 1024 4096 16384 --native-k 3 --as-it-is
  vllm-dflash bench --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts prompts.jsonl

exit code 0: measured, {failed}: could not run, {interrupted}: interrupted"""


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    loads = "\n".join(f"  {name:8} {meaning}" for name, meaning in LOADS.items())
    parser = commands.add_parser(
        "bench",
        help="measure plain decoding, vLLM's own DFlash and ours side by side",
        description="Measure plain decoding, vLLM's own DFlash at several fixed K, and ours, which"
        " chooses how much to draft.\nAll engines live side by side; every round measures each of"
        " them once under each load.",
        epilog=EPILOG.format(loads=loads, failed=COULD_NOT_RUN, interrupted=INTERRUPTED),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = parser.add_argument_group("pair")
    add_compared(pair, "held_out.jsonl of the demo pair")
    pair.add_argument(
        "--demo",
        type=Path,
        default=Path("models/demo"),
        metavar="FOLDER",
        help="without --target: the repository's demo pair, widened so that it costs as much as a"
        " larger one (default: models/demo)",
    )
    pair.add_argument(
        "--as-it-is",
        action="store_true",
        help="do not widen the demo pair: 5 M and 2.6 M parameters, whose steps take 2 ms",
    )
    pair.add_argument(
        "--random-drafter",
        action="store_true",
        help="fill a copy of the drafter with noise: what do useless drafts cost?",
    )
    sides = parser.add_argument_group("engines")
    about = "draft lengths of vLLM's own DFlash, an engine each, as far as the drafter's block goes"
    add_numbers(sides, "--native-k", [1, 3, 5, 7], about, nargs="*")
    sides.add_argument(
        "--native-schedule",
        choices=("tuned", "none"),
        help="whether to add vLLM's own DFlash with num_speculative_tokens_per_batch_size: of the K"
        " of --native-k, or no drafts, what is fastest at each concurrency when it is tried for a"
        " moment (default: tuned; with --context: none)",
    )
    add_numbers(sides, "--ours-fixed-k", [], "measure ours at these fixed K, too", nargs="*")
    sides.add_argument(
        "--beside",
        nargs="+",
        choices=(BLOCKS, *LOOK_UPS),
        default=[],
        metavar="ENGINE",
        help="more engines: blocks (ours without free drafts), ngram and suffix (vLLM's methods of"
        " these names, which look drafts up in the text; suffix needs arctic-inference)",
    )
    add_number(sides, "--max-model-len", 1024, "of every engine; --context raises it")
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
    what = load.add_mutually_exclusive_group()
    what.add_argument(
        "--load",
        nargs="+",
        metavar="LOAD",
        choices=LOADS,
        default=["closed"],
        help="(default: closed)",
    )
    what.add_argument(
        "--context",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="instead of a load: decoding alone, after prompts of so many tokens that were read"
        " before; the engines keep prefixes then (without numbers: 1024 2048 4096 8192 16384)",
    )
    load.add_argument(
        "--concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="of closed and its like, and of --context (default: 1 2 4 8 16 32; --context: 1 4)",
    )
    about = "requests in flight in each phase of swing"
    add_numbers(load, "--phases", [1, 32, 4, 16, 1, 32, 8, 2], about)
    about = "arrivals of poisson, as fractions of what plain decoding can serve, 16 at a time"
    add_numbers(load, "--rates", [0.3, 0.6, 0.9], about, type=float)
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
        "--where",
        action="store_true",
        help="then also show where the time goes, at each concurrency: milliseconds of a step and"
        " of a token in the target, the draft, its context, its planning, and the rest of the"
        " engine (on CPU)",
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
