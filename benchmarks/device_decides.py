"""Simulate what planning a step ahead brings on Model Runner V2, where the device decides.

    scripts/run.sh python benchmarks/device_decides.py

Uses recorded drafts of the demo pair (`record_drafts.py`). For each number of requests it prints
our tokens per second, relative to what the best fixed length, or none, would have brought in
hindsight. Times of steps come from the tables in `costs`. Nothing here was timed. 20 minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

HERE = Path(__file__).parent
MACHINES = ("assumed_gpu", "cpu_2_cores")
TEXTS = ("greedy", "drawn", "copies")


def main() -> None:
    """Print a table for each machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    requests = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    parser.add_argument("--concurrency", type=int, nargs="+", default=requests)
    parsed = parser.parse_args()
    notes = [
        "tokens/s of ours / those of the best fixed length in hindsight, plain decoding included;"
        " `+ text`: with free drafts",
        "greedy: what the demo target writes, which soon goes round in circles; drawn: the same at"
        " temperature 0.7; copies: of a document in the prompt, with edits",
    ]
    print_report([table(one, parsed.concurrency) for one in MACHINES], notes)


def table(machine: str, concurrency: list[int]) -> Table:
    """Make the table of one machine."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from support.cost_table import CostTable
    from support.judge import REGIMES, fixed_rates, ours, rate_of
    from support.recorded_drafts import recorded_drafts

    costs, rows = CostTable.read(machine), []
    for kind, drafts in zip(TEXTS, recorded_drafts(), strict=True):
        for name, regime in REGIMES.items():
            best = [max(fixed_rates(drafts, n, costs, regime).values()) for n in concurrency]
            for looks_up in (False, True):
                found = [
                    rate_of(ours(drafts, count, costs, regime, looks_up=looks_up)) / one
                    for count, one in zip(concurrency, best, strict=True)
                ]
                mean = float(np.exp(np.mean(np.log(found))))
                what = f"{kind}, {name}{' + text' if looks_up else ''}"
                rows.append([what, *(f"{one:.2f}" for one in (*found, mean))])
    return Table(costs.name, ["", *map(str, concurrency), "mean"], rows, words={0})


if __name__ == "__main__":
    main()
