"""Tokens/s of sides that are measured in turns: medians of rounds, and ratios within a round."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vllm_dflash.tools.bench.bench_report import spread
from vllm_dflash.tools.tables import Table

Measured = dict[tuple[int, str], list[float]]
"""Tokens/s of each round, by requests in flight and side."""


def rates_table(title: str, sides: Sequence[str], measured: Measured) -> Table:
    """Make a table of medians, and of ratios to the first side in the same round."""
    rows = []
    for count in sorted({count for count, _ in measured}):
        for side in sides:
            speeds = measured[count, side]
            ratios = spread(np.divide(speeds, measured[count, sides[0]]))
            rows.append([str(count), side, f"{statistics.median(speeds):.0f}", ratios])
    columns = ["requests in flight", "side", "tokens/s", f"/ {sides[0]}"]
    return Table(title, columns, rows, words=(1,))


def write_rates(measured: Measured, file: Path) -> None:
    """Write the numbers of all rounds as JSON."""
    record = [
        {"concurrency": count, "side": side, "tokens_per_second": speeds}
        for (count, side), speeds in measured.items()
    ]
    file.write_text(json.dumps(record, indent=1))
