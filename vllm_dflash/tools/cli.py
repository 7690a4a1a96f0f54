"""The command line `vllm-dflash COMMAND`. Each command is in the package of its name."""

from __future__ import annotations

import argparse
import io
import sys
import traceback
from collections.abc import Callable

from vllm_dflash import __version__
from vllm_dflash.tools.bench.bench_command import add_bench
from vllm_dflash.tools.console import COULD_NOT_RUN, INTERRUPTED, complain, terminable
from vllm_dflash.tools.demo.demo_command import add_demo
from vllm_dflash.tools.inspect.inspect_command import add_inspect
from vllm_dflash.tools.server import EngineDied, as_vllm_spells
from vllm_dflash.tools.verify.verify_command import add_verify


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts may hold what its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="vllm-dflash", description="DFlash speculative decoding for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"vllm-dflash {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for add_command in (add_demo, add_inspect, add_verify, add_bench):
        add_command(commands)
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    parsed, unknown = parser.parse_known_args([as_vllm_spells(word) for word in words[:end]])
    # Flags of `vllm serve` follow after --, those of `vllm bench serve` may be among bench's own.
    parsed.flags, parsed.client_flags = words[end + 1 :], unknown
    wrong = words[end:] if parsed.command == "inspect" else []
    if wrong := wrong + unknown * (parsed.command != "bench"):
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    return run_command(f"vllm-dflash {parsed.command}", lambda: parsed.run(parsed))


def run_command(name: str, run: Callable[[], int]) -> int:
    """Run a command, and print to standard error why it failed. Returns the exit code."""
    try:
        with terminable():
            return run()
    except KeyboardInterrupt:
        complain(name, "interrupted")
        return INTERRUPTED
    except (OSError, ValueError, EngineDied) as error:
        complain(name, error)
        return COULD_NOT_RUN
    except Exception as error:  # a bug; Python's own exit code, 1, would read as a verdict
        traceback.print_exc()
        complain(name, error)
        return COULD_NOT_RUN


if __name__ == "__main__":
    sys.exit(main())
