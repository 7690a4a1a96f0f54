"""Plant one fault after the other, and see whether the tests notice.

    make faults                                   # all of them; goes on where it was broken off
    scripts/run.sh python tests/faults/plant.py --only v1-context-one-late

A fault is an edit of a few lines, written by somebody who had not read the tests, in `v1.toml`,
`v2.toml` and `shared.toml` (those in `decisions_v2.toml` by its author).
Each is planted in a copy of the project. The tests that could notice run there in stages, quick
ones first, until one fails. What passes them all has survived.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import rich
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "build" / "faults.jsonl"
TIMEOUT = 240
"""Seconds for one test; an engine that hangs is noticed as well."""


@dataclass(frozen=True)
class Fault:
    """One planted bug."""

    name: str
    file: str
    harm: str
    """What a user would see."""
    old: str
    """Occurs once in the file."""
    new: str
    stages: tuple[tuple[str, ...], ...]
    """Arguments of pytest, one run after the other."""

    def planted(self, root: Path) -> str:
        """The file's text with the fault.

        Raises:
            ValueError: the text to replace is not there, or not only once.
        """
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: found {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a fault."""

    name: str
    by: str | None
    """The first test that failed; None: it survived."""
    seconds: float
    fault: str
    """Its edit and its stages; an outcome of another edit does not count."""


def read_faults(folder: Path = HERE) -> list[Fault]:
    """All that are written down."""
    faults = []
    for name in ("shared", "v1", "v2", "decisions_v2", "trees", "tree_kernels"):
        told = tomllib.loads((folder / f"{name}.toml").read_text())
        stages = tuple(tuple(stage) for stage in told["stages"])
        faults += [Fault(**entry, stages=stages) for entry in told["fault"]]
    return faults


def try_fault(fault: Fault) -> Outcome:
    """Run the tests on a copy with the fault."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy = Path(folder)
        copy_project(copy)
        (copy / fault.file).write_text(fault.planted(copy))
        by = next((failed for stage in fault.stages if (failed := _run(copy, stage))), None)
    return Outcome(fault.name, by, round(time.monotonic() - started), _print_of(fault))


def copy_project(folder: Path) -> None:
    """Everything git knows or would add, as it lies here, and the same virtual environment."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def _run(copy: Path, stage: tuple[str, ...]) -> str | None:
    """The first test that fails there."""
    command = ["scripts/run.sh", "pytest", "-x", "-q", "-p", "no:cacheprovider", *stage]
    done = subprocess.run(
        [*command, f"--timeout={TIMEOUT}"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    # Wrong arguments, no test, or somebody ended it: nothing was tried.
    if done.returncode in (4, 5, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL):
        raise RuntimeError(f"pytest {' '.join(stage)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def _print_of(fault: Fault) -> str:
    return json.dumps([fault.old, fault.new, fault.stages])


def known_outcomes(faults: list[Fault]) -> dict[str, Outcome]:
    """Of earlier runs, for faults that are still the same."""
    if not RESULTS.exists():
        return {}
    lines = [Outcome(**json.loads(line)) for line in RESULTS.read_text().splitlines()]
    prints = {fault.name: _print_of(fault) for fault in faults}
    return {one.name: one for one in lines if prints.get(one.name) == one.fault}


def main() -> None:
    """Try what was not tried yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of faults, or what they begin with")
    parser.add_argument("--again", action="store_true", help="also those with an outcome")
    parser.add_argument("--survivors", action="store_true", help="again those that survived")
    parser.add_argument("--jobs", type=int, default=2)
    settings = parser.parse_args()

    faults = read_faults()
    if settings.only:
        faults = [fault for fault in faults if fault.name.startswith(tuple(settings.only))]
    outcomes = {} if settings.again else known_outcomes(faults)
    if settings.survivors:
        outcomes = {name: one for name, one in outcomes.items() if one.by}
    todo = [fault for fault in faults if fault.name not in outcomes]
    RESULTS.parent.mkdir(exist_ok=True)
    with ThreadPoolExecutor(settings.jobs) as pool, RESULTS.open("a") as results:
        for done in as_completed([pool.submit(try_fault, fault) for fault in todo]):
            outcome = done.result()
            outcomes[outcome.name] = outcome
            results.write(json.dumps(asdict(outcome)) + "\n")
            results.flush()
            verdict = f"caught by {outcome.by}" if outcome.by else "SURVIVED"
            print(f"{len(outcomes)}/{len(faults)} {outcome.name}: {verdict}", flush=True)
    report(faults, outcomes)
    sys.exit(any(one.by is None for one in outcomes.values()))


def report(faults: list[Fault], outcomes: dict[str, Outcome]) -> None:
    """Caught and survived, by file; then the survivors."""
    table = Table("file", "planted", "caught")
    for file in sorted({fault.file for fault in faults}):
        here = [outcomes[fault.name] for fault in faults if fault.file == file]
        table.add_row(file, str(len(here)), str(sum(one.by is not None for one in here)))
    caught = sum(one.by is not None for one in outcomes.values())
    table.add_row("all", str(len(faults)), str(caught), style="bold")
    rich.print(table)
    for fault in faults:
        if outcomes[fault.name].by is None:
            rich.print(f"survived: [bold]{fault.name}[/] ({fault.file}): {fault.harm}")


if __name__ == "__main__":
    main()
