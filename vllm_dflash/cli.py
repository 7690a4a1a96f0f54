"""Command line: `vllm-dflash inspect`, `bench` and `verify`."""

from __future__ import annotations

import argparse
import json
import sys

from vllm_dflash import __version__
from vllm_dflash.bench.command import add_bench
from vllm_dflash.verify.command import add_verify

FITS, DOES_NOT_FIT, UNREADABLE = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vllm-dflash", description="DFlash speculative decoding for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="read a drafter and say whether it fits a target",
        description="Read a drafter, say whether it fits a target, and print the config to use.",
        epilog="example: vllm-dflash inspect models/demo/drafter --target models/demo/target;"
        f" exit code {FITS}: fits, {DOES_NOT_FIT}: does not fit, {UNREADABLE}: cannot be read",
    )
    inspect.add_argument("drafter", help="folder or repository of the drafter")
    inspect.add_argument("--target", required=True, help="folder or repository of the target")
    inspect.set_defaults(run=lambda parsed: inspect_pair(parsed.drafter, parsed.target))
    add_bench(commands)
    add_verify(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def inspect_pair(drafter: str, target: str) -> int:
    """Print what the drafter is and whether it fits. Returns the exit code."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dflash.checkpoint.read import read_drafter
    from vllm_dflash.selection import resolve

    try:
        spec = read_drafter(drafter)
    except ValueError as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    for name, value in spec.to_dict().items():
        print(f"{name:24} {value}")
    try:
        args = EngineArgs(model=target)
        target_config = args.create_model_config()
    except (ValueError, OSError) as error:
        print(f"target {target!r} cannot be read: {error}", file=sys.stderr)
        return UNREADABLE
    try:
        resolve({"method": "dflash", "model": drafter}, target_config)
    except ValueError as error:
        print(f"\nDoes not fit: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    config = json.dumps({"method": "dflash", "model": drafter})
    print(f"\nFits {target}. Use it with:\nvllm serve {target} --speculative-config '{config}'")
    return FITS


if __name__ == "__main__":
    sys.exit(main())
