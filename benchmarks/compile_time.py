"""How long planning compiles, when a machine first runs a version and from then on.

    scripts/run.sh python benchmarks/compile_time.py

Measures what an engine rehearses while its models load, each part in its own process: once with
nothing compiled, and once more with what the first run left. On a machine that also does other
work, compare the processor's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

IMPORTED = "from vllm_dflash.planning.rehearsal import *"
PARTS = {
    "V1": "rehearse_planner(7, 32)",
    "V2": "rehearse_ahead(7)",
}
TIMED = """
import json, time
started = time.perf_counter(), time.process_time()
{part}
print(json.dumps([time.perf_counter() - started[0], time.process_time() - started[1]]))
"""


def rehearse(part: str, cache: Path) -> tuple[float, float]:
    """Return clock and processor seconds of a process that compiles into the cache."""
    code = IMPORTED + TIMED.format(part=part)
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    clock, processor = json.loads(done.stdout.splitlines()[-1])
    return clock, processor


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for name, part in PARTS.items():
        seconds = []
        for _ in track(range(arguments.rounds), name):
            with TemporaryDirectory(prefix="compile-time-") as cache:
                seconds.append([*rehearse(part, Path(cache)), *rehearse(part, Path(cache))])
        first, first_cpu, again, _ = (statistics.median(one) for one in zip(*seconds, strict=True))
        rows.append([name, f"{first:.0f} s", f"{first_cpu:.0f} s", f"{again:.1f} s"])
    columns = ["what is compiled", "first start", "of the processor", "later starts"]
    print_report([Table("How long planning compiles", columns, rows)])


if __name__ == "__main__":
    main()
