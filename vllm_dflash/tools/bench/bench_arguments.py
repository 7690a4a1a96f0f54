"""What `vllm-dflash bench` is told on the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_dflash.tools.arguments import add_number, positive, share
from vllm_dflash.tools.console import INTERRUPTED

LOADS = {
    "closed": "a fixed number of requests in flight",
    "mixed": "the same, every other prompt with its words shuffled, so hard to draft for",
    "edit": "the same with prompts of its own: source code to write out again",
    "quote": "the same: passages to quote from",
    "prose": "the same: passages to go on from, which repeat little",
    "swing": "a number of requests in flight that changes from phase to phase",
    "poisson": "requests that arrive at random moments, half of them hard to draft for",
}
BESIDE = ("blocks", "ngram", "suffix")
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
FAILED = 2
TUNED, NO_SCHEDULE = "tuned", "none"


def add_bench_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """The sub-command's parser."""
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
        "  vllm-dflash bench --load edit quote prose --beside blocks ngram --native-k 3\n"
        "  vllm-dflash bench --where --native-k 3 --concurrency 1 8\n"
        "  vllm-dflash bench --context 1024 4096 16384 --native-k 3 --as-it-is\n"
        "  vllm-dflash bench --simulate-costs benchmarks/costs/*.json\n"
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
        "--as-it-is",
        action="store_true",
        help="do not widen the demo pair: 5 M and 2.6 M parameters, whose steps take 2 ms",
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
        metavar="RANGES",
        help="vLLM's own DFlash with num_speculative_tokens_per_batch_size, as in"
        " [[1,4,3],[5,64,0]], or none (default: tuned, the K among those of --native-k, or no"
        " drafts, that is fastest at each concurrency when it is tried for a moment; with"
        " --context: none)",
    )
    sides.add_argument(
        "--ours-fixed-k",
        type=positive,
        nargs="*",
        default=[],
        metavar="K",
        help="measure ours at these fixed draft lengths, too",
    )
    sides.add_argument(
        "--beside",
        nargs="+",
        choices=BESIDE,
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
    one_of_both = load.add_mutually_exclusive_group()
    one_of_both.add_argument(
        "--load",
        nargs="+",
        metavar="LOAD",
        choices=LOADS,
        default=["closed"],
        help="(default: closed)",
    )
    one_of_both.add_argument(
        "--context",
        type=positive,
        nargs="*",
        metavar="TOKENS",
        help="instead of a load: decoding alone, after prompts of so many tokens that were read"
        f" before; the engines keep prefixes then (if no numbers follow: {_words(CONTEXTS)})",
    )
    one_of_both.add_argument(
        "--simulate-costs",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="instead of measuring: decode recorded drafts as if steps took what a table of costs"
        " says (benchmarks/costs/assumed_gpu.json): what the planner would choose on that machine,"
        " with chains and with trees",
    )
    load.add_argument(
        "--concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="of closed and its like, and of --context (default: 1 2 4 8 16 32; --context: 1 4)",
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
        help="for result.json, result.md, result.png, where.png and logs (default: out/bench)",
    )
    return parser


def _words(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


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
