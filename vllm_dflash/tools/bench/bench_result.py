"""Results of a benchmark: tables of medians and paired ratios, and the file that keeps them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.tools.bench.sides import OURS, PLAIN, Side
from vllm_dflash.tools.tables import Table

SCHEMA = "vllm-dflash.bench/3"
CONCURRENCY = "concurrency"
THROUGHPUT = "output_throughput"
SEEN = {
    "TTFT": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT": "median_tpot_ms",
    "TPOT p99": "p99_tpot_ms",
    "tokens a verify step": "spec_decode_acceptance_length",
}
"""Columns of what clients saw, and their names in vLLM's results."""
SOME_WAITED = (
    "The KV cache did not hold all requests in flight ({}), so some may have waited. Lower"
    " --concurrency or raise VLLM_CPU_KVCACHE_SPACE (on CPUs), --gpu-memory-utilization or, after"
    " --, --kv-cache-memory-bytes."
)
Rounds = npt.NDArray[np.float64]
"""One value per round. Rounds of two sides are paired: divide them before taking the median."""


class Results:
    """Results by load, concurrency and side."""

    def __init__(self, sides: list[Side], measurements: Iterable[dict[str, Any]]) -> None:
        self.sides = sides
        self._results: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
        for one in measurements:
            self._results[one["load"], one["setting"], one["side"]].append(one["result"])

    @classmethod
    def read(cls, raw: dict[str, Any]) -> Results:
        """Take them from the content of a `result.json`."""
        return cls([Side(**side) for side in raw["sides"]], raw["measurements"])

    @property
    def loads(self) -> list[str]:
        """Measured loads, in order."""
        return list(dict.fromkeys(load for load, _, _ in self._results))

    def of_kind(self, *kinds: str) -> list[Side]:
        """Return the sides of these kinds, in order."""
        return [side for side in self.sides if side.kind in kinds]

    def settings(self, load: str) -> list[int]:
        """Return the numbers of requests in flight, in order."""
        return list(dict.fromkeys(setting for one, setting, _ in self._results if one == load))

    def rounds(self, load: str, setting: int, side: str, value: str = THROUGHPUT) -> Rounds:
        """Return one number per round, [rounds]; NaN where vLLM's result does not have it."""
        return np.array([one.get(value, np.nan) for one in self._results[load, setting, side]])


def spread(rounds: Rounds) -> str:
    """Format the median and range of rounds."""
    return f"{np.median(rounds):.2f} ({rounds.min():.2f} - {rounds.max():.2f})"


def throughput_table(results: Results, load: str) -> Table:
    """Make the table of every side's tokens per second.

    Its last columns are ours relative to plain decoding and to the fastest of all but ours, if both
    were measured.
    """
    names = [side.name for side in results.sides]
    others = [name for name in names if not name.startswith(OURS)]
    is_compared = {OURS, PLAIN} <= {*names}
    rows = []
    for setting in results.settings(load):
        rates = {name: results.rounds(load, setting, name) for name in names}
        medians = {name: float(np.median(rates[name])) for name in names}
        row = [str(setting), *(f"{medians[name]:.1f}" for name in names)]
        if is_compared:
            fastest = max(others, key=medians.__getitem__)
            row.append(spread(rates[OURS] / rates[PLAIN]))
            row.append(f"{spread(rates[OURS] / rates[fastest])}, {fastest}")
        rows.append(row)
    heads = ["ours / plain", "ours / fastest other"] if is_compared else []
    title = f"{load}: tokens/s, median of rounds; ratios of the same round, median (min - max)"
    return Table(title, [CONCURRENCY, *names, *heads], rows)


def waits_table(results: Results, load: str) -> Table:
    """Make the table of what clients saw of every side."""
    rows = []
    for setting in results.settings(load):
        for side in results.sides:
            seen = [results.rounds(load, setting, side.name, name) for name in SEEN.values()]
            *waits, length = (float(np.median(one)) for one in seen)
            cells = [f"{one:.1f}" for one in waits] + [f"{length:.2f}"]
            rows.append([str(setting), side.name, *(cell.replace("nan", "-") for cell in cells)])
    title = f"{load}: ms to the first token (TTFT) and per token after it (TPOT), median of rounds"
    return Table(title, [CONCURRENCY, "side", *SEEN], rows, words=(1,))


def tables_of(results: Results, load: str) -> list[Table]:
    """Make the tables of a load."""
    return [throughput_table(results, load), waits_table(results, load)]


@dataclass
class Record:
    """Everything that goes into `result.json`, and how it is shown."""

    about: dict[str, Any]
    """Command line, pair, flags of the servers, cells, versions, machine."""
    sides: list[Side]
    rounds: int
    """Rounds asked for; fewer may have been measured."""
    make_tables: Callable[[Results, str], list[Table]] = tables_of
    """Makes the tables of a load; the first one is also shown between rounds."""
    rounds_complete: int = 0
    measurements: list[dict[str, Any]] = field(default_factory=list)
    """Measurements of complete rounds: round, load, setting (requests in flight), side, and vLLM's
    result."""

    def finish_round(self, measurements: list[dict[str, Any]]) -> None:
        """Add the measurements of a complete round."""
        self.measurements += measurements
        self.rounds_complete += 1

    @property
    def results(self) -> Results:
        """Results of complete rounds."""
        return Results(self.sides, self.measurements)

    @property
    def tables(self) -> list[Table]:
        """Tables of all loads."""
        results = self.results
        return [table for load in results.loads for table in self.make_tables(results, load)]

    @property
    def notes(self) -> list[str]:
        """What a reader must know about the tables."""
        about = self.about
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        preloaded = ", ".join(about["preloaded"]) or "nothing"
        full = [
            f"{one['side']} at {one['setting']}"
            for one in self.measurements
            if not holds_all(one["result"], one["setting"])
        ]
        return [
            *([SOME_WAITED.format(", ".join(dict.fromkeys(full)))] if full else []),
            f"{about['pair']}; {versions}",
            f"{about['cpu']}, {about['cores']} cores; preloaded: {preloaded}",
            f"{self.rounds_complete} of {self.rounds} rounds are complete.",
        ]

    def write(self, out: Path) -> None:
        """Write `result.json`. If this is interrupted, that of the previous round remains."""
        kept = {
            "schema": SCHEMA,
            "about": self.about,
            "sides": [asdict(side) for side in self.sides],
            "rounds": self.rounds,
            "rounds_complete": self.rounds_complete,
            "measurements": self.measurements,
        }
        unfinished = out / "result.unfinished"
        unfinished.write_text(json.dumps(kept, indent=1))
        unfinished.replace(out / "result.json")


def holds_all(result: dict[str, Any], count: int) -> bool:
    """Whether the KV cache held this many of a result's requests, by their mean length."""
    tokens = result.get("total_input_tokens", 0) + result.get("total_output_tokens", 0)
    completed = max(1, result.get("completed", 1))
    needed = min(count, completed) * tokens / completed
    return not result.get("preemptions") and needed <= result.get("cache_tokens", math.inf)
