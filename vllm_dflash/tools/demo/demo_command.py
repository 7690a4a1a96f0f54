"""`vllm-dflash demo`: its arguments, and running it."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from vllm_dflash.tools.arguments import NUMBER, add_command, add_models, add_prompts
from vllm_dflash.tools.console import complain, output_console
from vllm_dflash.tools.default_dtype import with_dtype
from vllm_dflash.tools.demo_files import IN_A_CLONE, demo_folder, unpack_demo
from vllm_dflash.tools.progress import progress_on

DIFFERENT = 1
FLAGS = ["--max-model-len=1024", "--max-num-seqs=8", "--no-enable-prefix-caching"]
SOONER = ["--enforce-eager"]
"""For the demo pair: compiling takes minutes and makes its engines only about a tenth faster."""


ABOUT = """Generate the same texts with plain decoding and with DFlash, 1 and 8 at a time. Show the
speed, whether the texts are identical, and which tokens were drafted.

Without --target and --drafter, this uses the small pair that comes with the package, widened
to the cost of a larger one and not compiled, to start sooner. Its prompts are the last 160
characters of source files that it was not trained on. For other targets, they are questions."""
EPILOG = """Flags after -- are passed to all engines, as for `vllm serve`.

examples:
  vllm-dflash demo
  vllm-dflash demo --unpack
  vllm-dflash demo --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      -- --gpu-memory-utilization 0.8

exit code: 0 success, 1 float32 texts differ, 2 could not run, 130 or 143 interrupted"""


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    about = "generate text with and without DFlash; show speed and drafted tokens"
    texts = {"help": about, "description": ABOUT, "epilog": EPILOG}
    parser = add_command(commands, "demo", run_demo, **texts)
    add_models(parser)
    add_prompts(parser, "questions if the target has a chat template, otherwise text to continue")
    add = parser.add_argument
    about = "maximum new tokens per text (default: %(default)s)"
    add("--tokens", **NUMBER, default=48, help=about)
    about = "dtype of all engines (default: float32 for the demo pair, so that texts must be"
    about += " identical; for other pairs the model's, or float32 on CPUs without bfloat16)"
    add("--dtype", help=about)
    about = "folder for logs and the widened pair (default: %(default)s)"
    add("--out", type=Path, default=Path("out/demo"), metavar="FOLDER", help=about)
    about = f"only copy the small pair to {IN_A_CLONE} (16 MB), where the documentation's"
    add("--unpack", action="store_true", help=f"{about} examples expect it")


def run_demo(parsed: argparse.Namespace) -> int:
    """Generate texts and show them. Returns the exit code; `cli.main` reports what this raises."""
    if parsed.unpack:
        return run_unpack()
    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.checkpoint.refusal import missing_model_reason
    from vllm_dflash.tools.bench.bench_pair import given_pair, widened_demo
    from vllm_dflash.tools.bench.sides import Side, make_sides
    from vllm_dflash.tools.demo import demonstration
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
            prompts = [one[-demonstration.PROMPT_SHOWN :] for one in prompts]
    read_drafter(pair.drafter)  # what is wrong with it is said at once
    dtype = parsed.dtype or (None if own else "float32")
    flags = [*FLAGS, *([] if own else SOONER)]
    flags += with_dtype(dtype, progress, pair.target, parsed.flags)

    def start(side: Side) -> Server:
        module = "vllm_dflash.tools.demo.demo_server"
        return side.start(parsed.out / "logs", pair.target, flags, module=module)

    console = output_console()
    show = partial(demonstration.show_text, console=console)
    sides = make_sides(pair.drafter, [])
    found = demonstration.demonstrate(
        start, sides, prompts, parsed.tokens, progress, show, questions
    )
    demonstration.show_speeds(found, console)
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
