"""Compare the engine's drafter with the PyTorch reference, and name the first stage that differs.

    scripts/run.sh python benchmarks/parity models/demo/drafter --target models/demo/target
    scripts/run.sh python benchmarks/parity DRAFTER --target TARGET --prompts prompts.jsonl --json

Generates text, records every stage of every draft in the engine, and computes the same with the
Hugging Face target and the reference drafter: end to end, and each stage alone from the engine's
inputs. docs/engineering/parity.md says how to read the result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from parity.parity_report import (
    BUILT_IN,
    MAX_MODEL_LEN,
    TOKENS,
    TOLERANCES,
    make_notes,
    make_tables,
)
from vllm_dflash.tools.arguments import NUMBER, add_pair, add_prompts, not_negative, share
from vllm_dflash.tools.cli import run_command
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, TERMINATED, print_report
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.prompts import read_prompts

EQUAL, DIFFERS = 0, 1
NUM_PROMPTS = 4
OF_ENGINE = ("model_impl", "gpu_memory_utilization")
"""Arguments that go to the engine, if they are given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print. Returns the exit code."""
    parsed = make_parser().parse_args(arguments)
    return run_command("parity", lambda: run_parity(parsed))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = argparse.ArgumentParser(
        prog="parity",
        description=__doc__,
        epilog=f"exit code: {EQUAL} equal, {DIFFERS} differs, {COULD_NOT_RUN} could not run,"
        f" {INTERRUPTED} or {TERMINATED} interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pair(parser)
    add_prompts(parser, "built-in ones")
    about = "use only the first N prompts (default: %(default)s)"
    parser.add_argument("--num-prompts", **NUMBER, default=NUM_PROMPTS, help=about)
    about = "new tokens per prompt (default: %(default)s)"
    parser.add_argument("--tokens", **NUMBER, default=TOKENS, help=about)
    parser.add_argument(
        "--dtype",
        choices=TOLERANCES,
        default="float32",
        help="dtype of engine and reference (default: float32, where rounding is small)",
    )
    by_dtype = ", ".join(f"{value:g} in {dtype}" for dtype, value in TOLERANCES.items())
    parser.add_argument(
        "--tolerance",
        type=not_negative,
        metavar="X",
        help=f"largest relative error that counts as equal (default: {by_dtype})",
    )
    about = "maximum tokens of a request, up to the target's own (default: %(default)s)"
    parser.add_argument("--max-model-len", **NUMBER, default=MAX_MODEL_LEN, help=about)
    parser.add_argument("--model-impl", metavar="NAME", help="as for `vllm serve`")
    about = "share of a GPU's memory, as for `vllm serve`: less where others use the GPU, too"
    parser.add_argument("--gpu-memory-utilization", type=share, metavar="SHARE", help=about)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run_parity(parsed: argparse.Namespace) -> int:
    """Compare and print. Returns the exit code; `run_command` reports what this raises."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    prompts = read_prompts(parsed.prompts or BUILT_IN, parsed.num_prompts)
    progress = progress_on()
    with progress.stage("loading vLLM"):
        from parity.check import check_parity

    report = check_parity(
        parsed.drafter,
        parsed.target,
        prompts=prompts,
        tokens=parsed.tokens,
        dtype=parsed.dtype,
        tolerance=parsed.tolerance,
        max_model_len=parsed.max_model_len,
        revision=parsed.revision,
        drafter_overrides=parsed.drafter_overrides,
        progress=progress,
        **{name: value for name in OF_ENGINE if (value := getattr(parsed, name)) is not None},
    )
    if parsed.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(make_tables(report), make_notes(report))
    return EQUAL if report.is_equal else DIFFERS
