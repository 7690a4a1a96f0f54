"""Command line: `vllm-dflash inspect DRAFTER --target TARGET` and `vllm-dflash bench`."""

from __future__ import annotations

import argparse
import sys

from vllm_dflash import __version__
from vllm_dflash.bench.command import add_bench
from vllm_dflash.inspection.command import add_inspect


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vllm-dflash", description="DFlash speculative decoding for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_inspect(commands)
    add_bench(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
