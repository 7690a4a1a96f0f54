"""`vllm-dflash demo`: its arguments, and running it."""

from __future__ import annotations

import argparse
from functools import partial

from vllm_dflash.tools.arguments import add_folder, add_models, add_number, add_numbers, add_prompts
from vllm_dflash.tools.console import complain, output_console
from vllm_dflash.tools.default_dtype import choose_dtype
from vllm_dflash.tools.demo_files import IN_A_CLONE, demo_folder, unpack_demo
from vllm_dflash.tools.progress import progress_on

DIFFERENT = 1
FLAGS = ["--max-model-len=1024", "--max-num-seqs=8", "--no-enable-prefix-caching"]
SOONER = ["--enforce-eager"]
"""For the demo pair: compiling takes minutes and makes its engines only about a tenth faster."""


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="generate text with and without DFlash; show speed and drafted tokens",
        description="Generate the same texts with plain decoding and with DFlash, 1 and 8"
        " at a time. Show the\nspeed, whether the texts are identical, and which tokens were"
        " drafted.\n\nWithout --target and --drafter, this uses the small pair that comes with the"
        " package, widened\nto the cost of a larger one and not compiled, to start sooner. Its"
        " prompts are the last 160\ncharacters of source files that it was not trained on. For"
        " other targets, they are questions.",
        epilog="Flags after -- are passed to all engines, as for `vllm serve`.\n\n"
        "examples:\n"
        "  vllm-dflash demo\n"
        "  vllm-dflash demo --unpack\n"
        "  vllm-dflash demo --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\\n"
        "      -- --gpu-memory-utilization 0.8\n\n"
        "exit code: 0 success, 1 float32 texts differ, 2 could not run,"
        " 130 or 143 interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser)
    about = "questions if the target has a chat template, otherwise text to continue"
    add_prompts(parser, about)
    about = "also run vLLM's own DFlash at these draft lengths; about a minute for each"
    add_numbers(parser, "--native-k", [], about)
    add_number(parser, "--tokens", 48, "maximum new tokens per text")
    parser.add_argument(
        "--dtype",
        help="dtype of all engines (default: float32 for the demo pair, so that texts must be"
        " identical; for other pairs the model's, or float32 on CPUs without bfloat16)",
    )
    add_folder(parser, "--out", "out/demo", "folder for logs and the widened pair")
    parser.add_argument(
        "--unpack",
        action="store_true",
        help=f"only copy the small pair to {IN_A_CLONE} (16 MB), where the documentation's"
        " examples expect it",
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="flags of `vllm serve`, for all engines"
    )
    parser.set_defaults(run=run_demo)


def run_demo(parsed: argparse.Namespace) -> int:
    """Generate texts and show them. Returns the exit code; `cli.main` reports what this raises."""
    if parsed.unpack:
        return run_unpack()
    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.checkpoint.refusal import missing_model_reason
    from vllm_dflash.tools.bench.bench_pair import given_pair, widened_demo
    from vllm_dflash.tools.bench.sides import Side, make_sides
    from vllm_dflash.tools.demo.demonstration import (
        PROMPT_SHOWN,
        demonstrate,
        show_speeds,
        show_text,
    )
    from vllm_dflash.tools.prompts import QUESTIONS, default_prompts, held_out_beside, read_prompts
    from vllm_dflash.tools.server import Server

    demo, progress = demo_folder(), progress_on()
    pair = own = given_pair(parsed.target, parsed.drafter)
    if own and (fault := missing_model_reason(own.target)):
        raise ValueError(f"target {own.target!r}: {fault}.")
    target = own.target if own else str(demo / "target")
    prompts = read_prompts(parsed.prompts) if parsed.prompts else default_prompts(target)
    is_told = parsed.prompts or held_out_beside(target).is_file()
    questions = None if is_told else read_prompts(QUESTIONS)
    if pair is None:
        name = f"widening the demo pair to 200 M parameters: {parsed.out / 'widened'}"
        with progress.stage(name):
            pair = widened_demo(demo, parsed.out)
        if not parsed.prompts:
            # Prefill of whole prompts would take half of the time, and drafts do not speed it up.
            prompts = [one[-PROMPT_SHOWN:] for one in prompts]
    longest = read_drafter(pair.drafter).max_draft_tokens
    native_k = sorted({min(k, longest) for k in parsed.native_k})
    dtype = parsed.dtype or (None if own else "float32")
    flags = [*FLAGS, *([] if own else SOONER), *parsed.flags]
    for name, value in choose_dtype(dtype, progress, pair.target, parsed.flags).items():
        flags += [f"--{name}", value]

    def start(side: Side) -> Server:
        module = "vllm_dflash.tools.demo.demo_server"
        return side.start(parsed.out / "logs", pair.target, flags, module=module)

    sides = make_sides(pair.drafter, native_k)
    console = output_console()
    show = partial(show_text, console=console)
    found = demonstrate(start, sides, prompts, parsed.tokens, progress, show, questions)
    show_speeds(found, console)
    if found.dtype == "float32" and not found.all_identical:
        complain(
            "vllm-dflash demo", "float32 texts differ. This should never happen: please report it."
        )
        return DIFFERENT
    return 0


def run_unpack() -> int:
    """Copy the demo pair into the current folder, and print how to use it."""
    there = "The demo pair is in" if unpack_demo() else "Nothing was copied, there is already a"
    print(
        f"{there} {IN_A_CLONE}. Next:\n"
        f"  vllm-dflash inspect {IN_A_CLONE}/drafter --target {IN_A_CLONE}/target\n"
        f"  vllm serve {IN_A_CLONE}/target --max-model-len 1024 --speculative-config"
        f""" '{{"method": "dflash", "model": "{IN_A_CLONE}/drafter"}}'"""
    )
    return 0
