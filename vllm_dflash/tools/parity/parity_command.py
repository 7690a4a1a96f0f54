"""`vllm-dflash parity`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json

from vllm_dflash.tools.arguments import add_number, add_pair, add_prompts, not_negative
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, TERMINATED, print_report
from vllm_dflash.tools.parity.parity_report import (
    BUILT_IN,
    MAX_MODEL_LEN,
    TOKENS,
    TOLERANCES,
    make_notes,
    make_tables,
)
from vllm_dflash.tools.progress import progress_on
from vllm_dflash.tools.prompts import read_prompts

EQUAL, DIFFERS = 0, 1
NUM_PROMPTS = 4


def add_parity(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = commands.add_parser(
        "parity",
        help="compare the engine's drafter with the PyTorch reference, stage by stage",
        description="Compare the engine's drafter with the PyTorch reference, and name the first"
        " stage that differs.\nGenerates text, records every stage of every draft in the engine,"
        " and computes the same with the\nHugging Face target and the reference drafter: end to"
        " end, and each stage alone from the engine's\ninputs.",
        epilog="examples:\n"
        "  vllm-dflash parity models/demo/drafter --target models/demo/target\n"
        "  vllm-dflash parity models/demo/drafter --target models/demo/target"
        " --prompts models/demo/held_out.jsonl --json\n\n"
        f"exit code: {EQUAL} equal, {DIFFERS} differs, {COULD_NOT_RUN} could not run,"
        f" {INTERRUPTED} or {TERMINATED} interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pair(parser)
    add_prompts(parser, "built-in ones")
    add_number(parser, "--num-prompts", NUM_PROMPTS, "use only the first N prompts")
    add_number(parser, "--tokens", TOKENS, "new tokens per prompt")
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
    about = "maximum tokens per request in the engine, up to the target's own"
    add_number(parser, "--max-model-len", MAX_MODEL_LEN, about)
    parser.add_argument("--model-impl", metavar="NAME", help="as for `vllm serve`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run_parity)


def run_parity(parsed: argparse.Namespace) -> int:
    """Compare and print. Returns the exit code; `cli.main` reports what this raises."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    prompts = read_prompts(parsed.prompts or BUILT_IN, parsed.num_prompts)
    progress = progress_on()
    with progress.stage("loading vLLM"):
        from vllm_dflash.tools.parity.check import check_parity

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
        **({} if parsed.model_impl is None else {"model_impl": parsed.model_impl}),
    )
    if parsed.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(make_tables(report), make_notes(report))
    return EQUAL if report.is_equal else DIFFERS
