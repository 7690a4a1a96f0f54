"""`vllm-dflash bench`: its arguments and their defaults."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vllm_dflash.tools.arguments import (
    add_folder,
    add_models,
    add_number,
    add_numbers,
    add_prompts,
    duration,
    json_object,
    positive,
    share,
    whole,
)
from vllm_dflash.tools.bench.bench_datasets import add_dataset
from vllm_dflash.tools.bench.sides import BLOCKS, LOOK_UPS
from vllm_dflash.tools.demo_files import demo_folder
from vllm_dflash.vllms_own import OWN_KEYS

FULL: dict[str, Any] = {"seconds": 6.0, "rounds": 5, "concurrency": [1, 2, 4, 8, 16, 32]}
QUICK = FULL | {"seconds": 1.5, "rounds": 2, "concurrency": [1, 4, 16]}
OF_DATASETS = {"concurrency": [1, 8], "rounds": 2}
OF_STEPS = {"seconds": 2.0, "rounds": 3, "concurrency": [1, 4, 16], "context": [128, 1024]}
"""Defaults of the arguments with these names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all arguments of the command."""
    add_models_and_prompts(parser)
    add_sides(parser)
    measurements = parser.add_argument_group("measurements")
    add_dataset(measurements, measurements)
    add_windows(measurements)
    add_break_even(parser)
    add_out(parser, "out/bench")


def set_defaults(parsed: argparse.Namespace, **other: Any) -> None:
    """Set what the user left out. `other`: defaults that replace those of the closed load."""
    defaults = (QUICK if parsed.quick else FULL) | other
    if parsed.dataset_name is not None:
        defaults |= OF_DATASETS
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


def add_models_and_prompts(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the pair and its prompts. Returns their group."""
    pair = parser.add_argument_group("pair")
    add_models(pair)
    about = "with several files, the closed load is measured with each"
    add_prompts(pair, f"held_out.jsonl of the demo pair; {about}", nargs="+")
    about = "small pair to use without --target, widened to the cost of a larger one"
    add_folder(pair, "--demo", str(demo_folder()), about)
    return pair


def add_sides(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the engines. Returns their group."""
    sides = parser.add_argument_group("engines")
    about = "draft lengths of vLLM's own DFlash, one engine each, up to the drafter's maximum"
    add_numbers(sides, "--native-k", [1, 3, 5, 7], about)
    sides.add_argument(
        "--beside",
        nargs="+",
        type=beside,
        default=[],
        metavar="ENGINE",
        help="additional engines: ours with other options, as JSON ('{\"draft_window\": 256}'),"
        " blocks (ours without free drafts), ngram and suffix (vLLM's methods, which look up drafts"
        " in the text; suffix needs arctic-inference)",
    )
    add_number(sides, "--max-model-len", 1024, "maximum tokens per request in every engine")
    add_number(sides, "--max-num-seqs", 64, "maximum requests at a time in every engine")
    add_number(sides, "--tensor-parallel-size", 1, "tensor-parallel ranks of every engine")
    about = "dtype of every engine (default: the model's, or float32 on CPUs without bfloat16)"
    sides.add_argument("--dtype", help=about)
    about = "do not compile: engines start sooner, but are slower than in production"
    sides.add_argument("--enforce-eager", action="store_true", help=about)
    about = "share of a GPU's memory, divided equally among all engines (default: 0.9)"
    sides.add_argument(
        "--gpu-memory-utilization", type=share, default=0.9, metavar="SHARE", help=about
    )
    about = "KV cache size of every engine; if set, engines on a GPU start at the same time"
    sides.add_argument("--kv-cache-memory-bytes", type=positive, metavar="BYTES", help=about)
    return sides


def add_windows(load: argparse._ArgumentGroup) -> None:
    """Add what is measured, how long and how often."""
    load.add_argument(
        "--concurrency",
        type=positive,
        nargs="+",
        metavar="N",
        help="requests in flight (default: 1 2 4 8 16 32; with --dataset-name: 1 8)",
    )
    add_number(load, "--tokens", 96, "maximum new tokens per request")
    about = "duration of a measurement in seconds (default: 6)"
    load.add_argument("--seconds", type=duration, metavar="S", help=about)
    about = "rounds to measure (default: 5; with --dataset-name: 2)"
    load.add_argument("--rounds", type=positive, metavar="N", help=about)
    about = "rounds to discard, since kernels are prepared at the first batch of each size"
    about = f"{about} (default: 1)"
    load.add_argument("--warmup-rounds", type=whole, default=1, metavar="N", help=about)
    load.add_argument(
        "--quick",
        action="store_true",
        help="use faster defaults: windows of 1.5 s, 2 rounds, concurrency 1 4 16",
    )


def add_break_even(parser: argparse.ArgumentParser) -> None:
    """Add the measurement that needs no drafter."""
    group = parser.add_argument_group("break-even")
    about = "only time steps of the target that verify K drafts, and plain ones: how many tokens a"
    about += " step must bring on this machine (default K: 3 7 15; concurrency 1 4 16, 3 rounds,"
    about += " windows of 2 s that end after --tokens steps)"
    group.add_argument("--break-even", type=positive, nargs="*", metavar="K", help=about)
    about = "tokens of each request before these steps (default: 128 1024)"
    group.add_argument("--context", type=positive, nargs="+", metavar="N", help=about)


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the folder of the results."""
    add_folder(parser, "--out", default, "folder for result.json, result.md, result.png and logs")
