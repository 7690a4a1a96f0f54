"""Compares servers: in each round, measures every cell on each server in turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.tools.bench.bench_client import Cell, Measure, measure
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.sides import Side, SideServers
from vllm_dflash.tools.progress import Progress


def without_details(side: Side, result: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a result says of single requests; vLLM's own file has it."""
    return {
        name: value
        for name, value in result.items()
        if not isinstance(value, list) or name.startswith("spec_decode")
    }


@dataclass
class Comparison:
    """Measures cells on every side of a record, and writes the results to a folder."""

    record: Record
    cells: Sequence[Cell]
    servers: SideServers
    out: Path
    progress: Progress
    warmup_rounds: int = 1
    measure: Measure = measure
    shorten: Callable[[Side, dict[str, Any]], dict[str, Any]] = without_details
    """What of a result is kept in `result.json`."""

    def run(self) -> None:
        """Start the servers, measure all rounds, and write the results after each."""
        self.progress.say(self.announcement())
        sides, rounds = self.record.sides, self.record.rounds
        with self.servers:
            for one in self.servers.start(sides, self.progress):
                self.record.about["versions"] |= one["versions"]
            for number in range(-self.warmup_rounds, rounds):
                first = number % len(sides)  # so that no side always comes first in a measurement
                in_turns = [*sides[first:], *sides[:first]]
                found = self._measure_round(number, in_turns)
                if number < 0:
                    continue
                self.record.finish_round(found)
                self.record.write(self.out)
                if number + 1 < rounds:  # the report follows the last round
                    results = self.record.results
                    for load in results.loads:
                        self.progress.say(self.record.table_makers[0](results, load).plain())

    def announcement(self) -> str:
        """Say what will run."""
        names = [side.name for side in self.record.sides]
        return (
            f"starting {len(names)} servers ({', '.join(names)}), then {self.warmup_rounds} warm-up"
            f" and {self.record.rounds} measured rounds of {len(self.cells) * len(names)}"
            f" measurements. Ctrl-C stops; complete rounds are kept in {self.out}."
        )

    def _measure_round(self, number: int, sides: Sequence[Side]) -> list[dict[str, Any]]:
        """Measure every cell on each side in turn; negative numbers are those of warm-up rounds."""
        name = "warm-up" if number < 0 else f"round {number + 1} of {self.record.rounds}"
        found: list[dict[str, Any]] = []
        with self.progress.stage(name, len(self.cells) * len(sides), "measurements") as tell:
            for cell in self.cells:
                for side in sides:
                    tell(len(found), f"{cell}: {side.name}")
                    file = self.out / "raw" / f"{_slug(name, cell, side.name)}.json"
                    seed = number + self.warmup_rounds  # the same for all sides
                    result = self.measure(self.servers[side.name], cell, seed, file)
                    about = {"round": number, "load": cell.load, "setting": cell.concurrency}
                    found.append({**about, "side": side.name, "result": self.shorten(side, result)})
            tell(len(found))
        return found


def _slug(*names: object) -> str:
    """Return a file's name made of these names."""
    return "-".join(re.findall(r"\w+", " ".join(map(str, names))))
