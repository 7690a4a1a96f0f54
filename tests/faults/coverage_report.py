"""Report which statements of the package are executed by unit tests and by engine tests.

    make coverage                        # measures what has changed: up to an hour
    make coverage ARGS=--as-measured     # from earlier measurements, for files that are unchanged

Only statements inside functions are counted; all others run when a module is imported. What numba
compiles is counted separately: nothing that watches Python sees it run.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import rich
from coverage import Coverage
from rich.table import Table

from faults.copied import BUILD, ROOT
from faults.executed import digest
from faults.nearest import ENGINE, UNIT, Records
from faults.plant import make_records
from faults.source import Function, PackageSource, function_at


@dataclass(frozen=True)
class Lines:
    """Statements of one file, by their lines."""

    file: str
    seen: set[int]
    """Statements that can be seen to run."""
    compiled: set[int]
    unit: set[int]
    engine: set[int]

    @property
    def neither(self) -> list[int]:
        """Statements that no measured test executed."""
        return sorted(self.seen - self.unit - self.engine)

    def row(self) -> dict[str, int]:
        """Return numbers of statements."""
        return {
            "statements": len(self.seen),
            "unit": len(self.seen & self.unit),
            "engine": len(self.seen & self.engine),
            "neither": len(self.neither),
            "compiled": len(self.compiled),
        }


def lines_of(source: PackageSource, records: Records) -> list[Lines]:
    """Return the lines of every file of the package that has functions."""
    parser = Coverage(data_file=None, config_file=False, messages=False)
    found = []
    for file, functions in source.functions.items():
        statements: set[int] = set()
        compiled: set[int] = set()
        for line in parser.analysis2(str(ROOT / file))[1]:
            if function := function_at(functions, line, in_body=True):
                (compiled if function.is_compiled else statements).add(line)
        executed: dict[str, set[int]] = {UNIT: set(), "engine": set()}
        now = digest(ROOT / file)
        for record in records.all:
            if record.told["sources"].get(file) == now:
                kind = UNIT if record.kind == UNIT else "engine"
                executed[kind] |= set(record.told["lines"][file])
        if statements or compiled:
            found.append(Lines(file, statements, compiled, executed[UNIT], executed["engine"]))
    return found


def spans(lines: Iterable[int], functions: list[Function]) -> list[str]:
    """Return `function 12-14, 17` for each function that contains some of these lines."""

    def name_at(line: int) -> str:
        function = function_at(functions, line)
        return function.name if function else "module"

    written = []
    for name, those in groupby(lines, name_at):
        runs: list[list[int]] = []
        for line in those:
            if runs and line == runs[-1][1] + 1:
                runs[-1][1] = line
            else:
                runs.append([line, line])
        texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
        written.append(f"{name} {', '.join(texts)}")
    return written


def main() -> None:
    """Print the table, then what neither executes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as-measured", action="store_true", help="measure nothing")
    parser.add_argument("--jobs", type=int, default=2)
    settings = parser.parse_args()
    if settings.as_measured:
        records = Records(ROOT, BUILD / "executed")
    else:
        records = make_records((UNIT, *ENGINE), settings.jobs, strictly=True)
    source = PackageSource(ROOT)
    found = lines_of(source, records)
    table = Table("file", "statements", "unit", "engine", "neither", "compiled")
    total: Counter[str] = Counter()
    for lines in found:
        row = lines.row()
        total.update(row)
        table.add_row(lines.file.removeprefix("vllm_dflash/"), *map(str, row.values()))
    table.add_row("all", *map(str, total.values()), style="bold")
    rich.print(table)
    print("Executed by neither:")
    for lines in found:
        for span in spans(lines.neither, source.functions[lines.file]):
            print(f"  {lines.file}: {span}")
    kinds = (UNIT, *ENGINE)
    if stale := records.stale(kinds, strictly=True):
        count = len(records.files(kinds))
        print(f"{len(stale)} of {count} files of tests were not measured since the last change")


if __name__ == "__main__":
    main()
