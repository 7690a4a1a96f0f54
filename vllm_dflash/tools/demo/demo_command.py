"""`vllm-dflash demo`: its arguments, and from them to a screen and a picture."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_dflash.tools.arguments import add_number, positive
from vllm_dflash.tools.console import INTERRUPTED, complain, output_console

if TYPE_CHECKING:
    from vllm_dflash.tools.bench.bench_pair import Pair
    from vllm_dflash.tools.demo.demonstration import Demonstration
    from vllm_dflash.tools.progress import Progress

DIFFERENT, COULD_NOT_RUN = 1, 2
DEMO = Path("models/demo")
FLAGS = ["--max-model-len=1024", "--max-num-seqs=8", "--no-enable-prefix-caching"]
SOONER = ["--enforce-eager"]
"""For the demo pair: compiling takes minutes, and makes all its engines about a tenth faster."""
NO_PICTURE = 'No picture was drawn, for want of matplotlib: pip install "vllm-dflash[bench]"'


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    parser = commands.add_parser(
        "demo",
        help="write some text with and without DFlash, and show how fast, and who wrote what",
        description="Write the same texts with plain decoding and with DFlash, 1 and 8"
        " at a time, and show\nhow fast that was, whether the texts are the same, and which tokens"
        " were drafted.\nWithout a pair of yours, the small one of the repository is taken, widened"
        " to a size worth speeding up,\nand not compiled, so that it starts sooner.",
        epilog="Flags of `vllm serve` after -- are for all engines.\n\n"
        "examples:\n"
        "  vllm-dflash demo\n"
        "  vllm-dflash demo --target Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 \\\n"
        "      -- --gpu-memory-utilization 0.8\n\n"
        "exit code 0: shown, 1: float32 texts differ, 2: could not run, 130: interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", help="folder or repository of the target; needs --drafter")
    parser.add_argument("--drafter", help="folder or repository of the drafter")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='lines of {"prompt": "..."} or of plain text (default: some of many kinds; for the'
        " demo pair, text it was not trained on)",
    )
    parser.add_argument(
        "--native-k",
        type=positive,
        nargs="*",
        default=[],
        metavar="K",
        help="draft lengths of vLLM's own DFlash, an engine and about a minute each (default:"
        " none; 3 is a good one for the demo pair)",
    )
    add_number(parser, "--tokens", 64, "new tokens a text at most")
    parser.add_argument(
        "--dtype",
        help="of all engines (default: float32 for the demo pair, in which texts must be the same"
        " to the last token; auto for yours)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/demo"),
        metavar="FOLDER",
        help="for demo.png, logs and the widened pair (default: out/demo)",
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="flags of `vllm serve`, for all engines"
    )
    parser.set_defaults(run=run_demo)


def run_demo(parsed: argparse.Namespace) -> int:
    """Write texts and show them. Returns the exit code."""
    from vllm_dflash.tools.demo.demo_report import show
    from vllm_dflash.tools.engine_process import EngineDied
    from vllm_dflash.tools.progress import progress_on

    console = output_console()
    try:
        found = _demonstrate(parsed, progress_on())
        show(found, console)
        if find_spec("matplotlib") is None:
            print(NO_PICTURE)
        else:
            from vllm_dflash.tools.demo.demo_plot import plot

            plot(found, parsed.out / "demo.png")
            print(f"The same as a picture: {parsed.out / 'demo.png'}")
    except KeyboardInterrupt:
        complain("demo", "interrupted")
        return INTERRUPTED
    except (OSError, ValueError, EngineDied) as error:
        complain("demo", error)
        return COULD_NOT_RUN
    if found.dtype == "float32" and not found.all_identical:
        complain("demo", "float32 texts differ. This should never happen: please report it.")
        return DIFFERENT
    return 0


def _demonstrate(parsed: argparse.Namespace, progress: Progress) -> Demonstration:
    """Raises ValueError where something does not fit."""
    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.tools.bench.sides import make_sides
    from vllm_dflash.tools.demo.demonstration import demonstrate
    from vllm_dflash.tools.prompts import read_prompts
    from vllm_dflash.tools.verify.gate_prompts import default_prompts

    own = parsed.target is not None
    if parsed.prompts is not None:
        prompts = read_prompts(parsed.prompts)
        if not prompts:
            raise ValueError(f"there are no prompts in {parsed.prompts}.")
    else:
        prompts = default_prompts(parsed.target if own else str(DEMO / "target"))
    pair = _choose_pair(parsed, progress)
    longest = read_drafter(pair.drafter).max_draft_tokens
    native_k = sorted({min(k, longest) for k in parsed.native_k})
    return demonstrate(
        pair.target,
        make_sides(pair.drafter, native_k, []),
        prompts,
        parsed.tokens,
        dtype=parsed.dtype or ("auto" if own else "float32"),
        flags=[*FLAGS, *([] if own else SOONER), *parsed.flags],
        logs=parsed.out / "logs",
        progress=progress,
    )


def _choose_pair(parsed: argparse.Namespace, progress: Progress) -> Pair:
    from vllm_dflash.checkpoint.refusal import folder_fault
    from vllm_dflash.tools.bench.bench_pair import Pair, widened_demo

    if (parsed.target is None) != (parsed.drafter is None):
        raise ValueError("--target and --drafter belong together.")
    if parsed.target is not None:
        if fault := folder_fault(parsed.target):
            raise ValueError(f"target {parsed.target!r}: this folder {fault}.")
        return Pair(parsed.target, parsed.drafter, "")
    widened = parsed.out / "widened"
    with progress.stage(f"the demo pair, widened to 200 M parameters in {widened}, not compiled"):
        return widened_demo(DEMO, parsed.out)
