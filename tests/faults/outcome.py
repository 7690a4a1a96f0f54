"""Outcomes of planted faults: kept from run to run, and reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import rich
from rich.table import Table

from faults.fault import Fault
from faults.nearest import UNIT


@dataclass(frozen=True)
class Outcome:
    """Outcome of one fault."""

    name: str
    by: str | None
    """The first test that failed; None if the fault survived."""
    stage: str
    """Stage of that test: `unit` (of `make check`), `unit v2`, `engine`, `engine v2`. For a fault
    that survived, the last stage tried."""
    seconds: float
    fault: str
    """Its edit (`print_of`); an outcome of another edit does not count."""


def print_of(fault: Fault) -> str:
    """Return what identifies the fault's edit."""
    return json.dumps([fault.old, fault.new])


def known_outcomes(results: Path, faults: list[Fault]) -> dict[str, Outcome]:
    """Return outcomes of earlier runs, for faults that are still the same."""
    if not results.exists():
        return {}
    told = [json.loads(line) for line in results.read_text().splitlines()]
    prints = {fault.name: print_of(fault) for fault in faults}
    return {
        one["name"]: Outcome(**one)
        for one in told
        if "stage" in one and prints.get(one["name"]) == one["fault"]
    }


def _counts(those: Iterable[Fault], outcomes: dict[str, Outcome]) -> list[str]:
    stages = [
        outcome.stage if outcome.by else "survived"
        for fault in those
        if (outcome := outcomes.get(fault.name))
    ]
    engines = stages.count("engine") + stages.count("engine v2")
    numbers = (len(stages), stages.count(UNIT), stages.count("unit v2"), engines)
    return [str(number) for number in (*numbers, stages.count("survived"))]


def report(faults: list[Fault], outcomes: dict[str, Outcome]) -> None:
    """Print how many faults each stage caught, by file and by room; then the survivors."""
    by_what: tuple[tuple[str, Callable[[Fault], str]], ...] = (
        ("file", lambda fault: fault.file.removeprefix("vllm_dflash/")),
        ("room", lambda fault: fault.room),
    )
    for title, group_of in by_what:
        table = Table(title, "planted", "unit", "unit v2", "engine", "survived")
        for group in sorted({group_of(fault) for fault in faults}):
            here = [fault for fault in faults if group_of(fault) == group]
            table.add_row(group, *_counts(here, outcomes))
        table.add_row("all", *_counts(faults, outcomes), style="bold")
        rich.print(table)
    for fault in faults:
        if (one := outcomes.get(fault.name)) and one.by is None:
            what = "unit tests" if one.stage.startswith(UNIT) else "all"
            rich.print(f"survived {what}: [bold]{fault.name}[/] ({fault.file}): {fault.harm}")
