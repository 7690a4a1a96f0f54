"""Command line: `vllm-dflash COMMAND`. Each command stands in the package of its name."""

from __future__ import annotations

import argparse
import sys

from vllm_dflash import __version__
from vllm_dflash.tools.bench.bench_command import add_bench
from vllm_dflash.tools.demo.demo_command import add_demo
from vllm_dflash.tools.inspect.inspect_command import add_inspect
from vllm_dflash.tools.parity.parity_command import add_parity
from vllm_dflash.tools.verify.verify_command import add_verify


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="vllm-dflash", description="DFlash speculative decoding for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_command in (add_demo, add_inspect, add_verify, add_parity, add_bench):
        add_command(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
