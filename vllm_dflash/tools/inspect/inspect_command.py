"""`vllm-dflash inspect`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import redirect_stdout
from typing import Any

from vllm_dflash.tools.arguments import NUMBER, add_command, add_pair
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.inspect.inspection import (
    DOES_NOT_FIT,
    FITS,
    UNREADABLE,
    make_notes,
    make_tables,
)

ENGINE: dict[str, dict[str, Any]] = {
    "tensor_parallel_size": NUMBER | {"help": "number of ranks"},
    "max_model_len": NUMBER | {"help": "maximum tokens per request"},
    "dtype": {"help": "dtype of the weights: auto, bfloat16, float16 or float32"},
    "kv_cache_dtype": {"help": "dtype of the KV cache, such as auto or fp8"},
    "draft_kv_cache_dtype": {"help": "dtype of the drafter's KV cache (default: the same)"},
    "model_impl": {"help": "vLLM's implementation of the target, such as transformers"},
    "trust_remote_code": {"action": "store_true", "help": "allow the target's own code"},
}
"""vLLM's options that this command takes, and their arguments for argparse."""
ABOUT = """Show what a drafter is, whether it fits a target, and how much memory the drafter needs.
Reads configs and the headers of safetensors files. Loads no weights and needs no GPU."""
EPILOG = f"""exit code: {FITS} fits, {DOES_NOT_FIT} does not fit, {UNREADABLE} could not be read

examples:
  vllm-dflash inspect models/demo/drafter --target models/demo/target
  vllm-dflash inspect models/demo/drafter --target models/demo/target \\
      --max-model-len 2048 --json
  vllm-dflash inspect z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B"""


def add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command to the command line."""
    about = "show a drafter, whether it fits a target, and the memory that it needs"
    texts = {"help": about, "description": ABOUT, "epilog": EPILOG}
    parser = add_command(commands, "inspect", run_inspect, **texts)
    add_pair(parser)
    about = "print only a JSON object (see docs/inspect.md)"
    parser.add_argument("--json", action="store_true", help=about)
    engine = parser.add_argument_group("engine settings that affect the result")
    for name, option in ENGINE.items():
        engine.add_argument(f"--{name.replace('_', '-')}", **option)


def run_inspect(parsed: argparse.Namespace) -> int:
    """Inspect and print the result; errors go to standard error. Returns the exit code."""
    # vLLM logs to standard output unless told otherwise before it is imported.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with redirect_stdout(sys.stderr):
        from vllm_dflash.tools.inspect.inspect_pair import inspect_pair

        found = inspect_pair(
            parsed.drafter,
            parsed.target,
            revision=parsed.revision,
            drafter_overrides=parsed.drafter_overrides,
            **{name: getattr(parsed, name) for name in ENGINE if getattr(parsed, name)},
        )
    if parsed.json:
        print(json.dumps(found.to_dict(), indent=2))
        return found.exit_code
    notes = make_notes(found)
    print_report(make_tables(found), notes if found.error is None else ())
    if found.error is not None:
        print("\n".join(notes), file=sys.stderr)
    return found.exit_code
