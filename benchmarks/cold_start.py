"""Time whole starts of an engine up to its first token: a version's first on a machine, and later.

    scripts/run.sh python benchmarks/cold_start.py

With DFlash and without, in turns, each in its own processes. A first start finds nothing compiled,
neither vLLM's code nor ours; the next start finds what the first one left. `--native` adds vLLM's
own DFlash.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import Progress

from demo_models import DEMO, DFLASH
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

SIDES: dict[str, tuple[dict[str, Any] | None, dict[str, str]]] = {
    "plain": (None, {}),
    "vllm-dflash": (DFLASH, {}),
    "native": ({**DFLASH, "num_speculative_tokens": 7}, {"VLLM_PLUGINS": ""}),
}
"""Speculative config, and environment variables to set."""
START = """
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model={model!r}, speculative_config={speculative!r}, max_model_len=1024)
    llm.generate("import os", SamplingParams(max_tokens=1), use_tqdm=False)
"""


def seconds_of_start(side: str, caches: Path) -> float:
    """Return seconds of a process that starts an engine, has it write a token, and ends.

    Raises:
        subprocess.CalledProcessError: it failed; its output is shown.
    """
    speculative, more = SIDES[side]
    script = caches / "script" / "start.py"  # not beside the caches: Python looks for modules there
    script.parent.mkdir(exist_ok=True)
    script.write_text(START.format(model=str(DEMO / "target"), speculative=speculative))
    kept = {"XDG_CACHE_HOME": str(caches), "VLLM_CACHE_ROOT": str(caches / "vllm")}
    environment = {**os.environ, **kept, **more, "VLLM_LOGGING_LEVEL": "ERROR"}
    started = time.perf_counter()
    subprocess.run([sys.executable, str(script)], env=environment, check=True, stdout=sys.stderr)
    return time.perf_counter() - started


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--native", action="store_true", help="vLLM's own DFlash, too")
    arguments = parser.parse_args()
    sides = [name for name in SIDES if name != "native" or arguments.native]
    seconds: dict[tuple[str, str], list[float]] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("starts", total=2 * len(sides) * arguments.rounds)
        for _ in range(arguments.rounds):
            for side in sides:
                with TemporaryDirectory(prefix="cold-start-") as caches:
                    for which in ("first", "later"):
                        one = seconds_of_start(side, Path(caches))
                        seconds.setdefault((side, which), []).append(one)
                        progress.advance(task)
    rows = []
    for side in sides:
        row = [side]
        for which in ("first", "later"):
            took = seconds[side, which]
            # Differences within a round, because a machine's speed varies over time.
            more = [a - b for a, b in zip(took, seconds["plain", which], strict=True)]
            row += [f"{statistics.median(took):.1f} s", f"{statistics.median(more):+.1f} s"]
        rows.append(row)
    columns = ["", "first start", "than plain", "later starts", "than plain"]
    title = f"Seconds from nothing to a token, medians of {arguments.rounds} rounds"
    print_report([Table(title, columns, rows, words={0})])


if __name__ == "__main__":
    main()
