"""The record of a benchmark so far, and the files that keep it."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_client import Cell
from vllm_dflash.tools.bench.bench_result import Results, throughput_table, waits_table
from vllm_dflash.tools.bench.sides import Side
from vllm_dflash.tools.tables import Table

SCHEMA = "vllm-dflash.bench/3"
MakeTable = Callable[[Results, str], Table]


@dataclass
class Record:
    """Everything that goes into `result.json`, and how it is shown."""

    about: dict[str, Any]
    """Command line, pair, flags of the servers, cells, versions, machine."""
    sides: list[Side]
    rounds: int
    """Rounds asked for; fewer may have been measured."""
    table_makers: Sequence[MakeTable] = (throughput_table, waits_table)
    """Tables of a load; the first one is also shown between rounds."""
    plots: bool = True
    """Whether there is a plot of such results."""
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
        """Tables of `result.md`."""
        return [
            make(self.results, load) for load in self.results.loads for make in self.table_makers
        ]

    def write(self, out: Path) -> None:
        """Write `result.json`, `result.md` and, unless there is no plot, `result.png`."""
        kept = {
            "schema": SCHEMA,
            "about": self.about,
            "sides": [asdict(side) for side in self.sides],
            "rounds": self.rounds,
            "rounds_complete": self.rounds_complete,
            "measurements": self.measurements,
        }
        # If this is interrupted, the file of the previous round remains.
        unfinished = out / "result.unfinished"
        unfinished.write_text(json.dumps(kept, indent=1))
        unfinished.replace(out / "result.json")
        parts = [self._head(), *(table.markdown() for table in self.tables)]
        if self.plots:
            from vllm_dflash.tools.bench.plot import plot_panels

            plot_panels([(self.results, load) for load in self.results.loads], out / "result.png")
            parts.append("![](result.png)\n")
        (out / "result.md").write_text("\n".join(parts))

    def _head(self) -> str:
        about = self.about
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        preloaded = ", ".join(about["preloaded"]) or "nothing"
        return (
            "# vllm-dflash bench\n\n"
            f"{self.rounds_complete} of {self.rounds} rounds are complete.\n\n"
            f"- pair: {about['pair']}\n"
            f"- versions: {versions}\n"
            f"- machine: {about['cpu']}, {about['cores']} cores; preloaded: {preloaded}\n"
            f"- command: `{about['command']}`\n"
        )


def describe(
    command: list[str], pair: str, flags: Sequence[str], cells: Sequence[Cell]
) -> dict[str, Any]:
    """Return what a reader needs to know about the results. `flags`: those of the servers."""
    preloaded = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return {
        "command": shlex.join(command),
        "pair": pair,
        "flags": shlex.join(flags),
        "cells": [asdict(cell) for cell in cells],
        "versions": {},  # filled in by the servers
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "preloaded": [Path(library).name for library in preloaded],
    }


def cpu_name() -> str:
    """Return the CPU's name according to the system."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text() if info.exists() else "", re.M)
    return found[1] if found else platform.processor() or "unknown"
