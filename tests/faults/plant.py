"""Plant one fault after the other, and see whether the tests notice.

    make faults                                   # all of them; continues where it was interrupted
    make faults ARGS="--only v1-context-one-late"
    make faults ARGS="--unit --from FILE.toml"    # only unit tests, faults of another list

Each fault is planted in a copy of the project, and the nearest tests run, quick ones first, until
one fails: unit tests that execute the faulty function, other unit tests of that room, then engine
tests that execute it. A fault that passes them all has survived.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from faults.copied import BUILD, ROOT, Copy, copied, in_copies
from faults.fault import LISTS, Fault, read_faults
from faults.fork_server import Request
from faults.nearest import (
    ENGINE,
    RUNNERS,
    UNIT,
    MeasuredTest,
    Records,
    nearest,
    quickest,
    request_for,
)
from faults.outcome import Outcome, known_outcomes, print_of, report
from faults.source import PackageSource, edited_lines

RESULTS = BUILD / "faults.jsonl"
NEAREST_UNIT_S = 300.0
OTHER_UNIT_S = 60.0
ENGINE_S = 240.0
"""Seconds that the tests of a stage may take in total, as measured without a fault."""


def stages(
    fault: Fault, records: Records, source: PackageSource
) -> Iterator[tuple[str, list[MeasuredTest]]]:
    """Yield tests to run, the nearest first, with the name of their stage."""
    planted = fault.planted(ROOT)
    tests = nearest(records, source, fault.file, planted)
    lines = edited_lines((ROOT / fault.file).read_text(), planted)
    reaching = records.reaching(fault.file, lines)
    units = [test for test in tests if test.kind == UNIT]
    room = (*Path(fault.file).parts[1:-1], "test_")[0]
    others = [test for test in records.of_folder(f"tests/unit/{room}") if test not in set(units)]
    engines = [test for test in tests if test.kind in ENGINE]
    for name, those, cap in (
        (UNIT, units, NEAREST_UNIT_S),
        (UNIT, others, OTHER_UNIT_S),
        ("engine", engines, ENGINE_S),
    ):
        chosen = quickest(those, cap, reaching)
        for runner in RUNNERS:
            if of_runner := [test for test in chosen if test.runner == runner]:
                yield name + " v2" * (runner == "v2"), of_runner


class Planting:
    """Tries faults, one at a time in each copy: by unit tests, or by engine tests after them."""

    def __init__(self, records: Records, *, unit_only: bool):
        self.records, self.unit_only = records, unit_only
        self.source = PackageSource(ROOT)

    def try_fault(self, fault: Fault, number: int, copy: Copy) -> Outcome:
        """Run the tests nearest to it."""
        started, caught_by = time.monotonic(), None
        stage = UNIT if self.unit_only else "engine"
        with copy.planted(fault, number):
            for name, tests in stages(fault, self.records, self.source):
                if caught_by is None and name.startswith(UNIT) == self.unit_only:
                    stage = name
                    ended = copy.server(tests[0].runner).run(request_for(tests))
                    if ended.failed or ended.code not in (0, 5):
                        caught_by = ended.failed or f"pytest ended with {ended.code}"
        seconds = round(time.monotonic() - started)
        return Outcome(fault.name, caught_by, stage, seconds, print_of(fault))


def make_records(kinds: tuple[str, ...], jobs: int) -> Records:
    """Return what tests of these kinds execute; measure what is missing."""
    records = Records(ROOT, BUILD / "executed")
    if todo := records.stale(kinds):
        print(f"what {len(todo)} files of tests execute is measured first", flush=True)

        def measuring(runner: str, files: list[str]) -> Callable[[Copy], str]:
            return lambda copy: records.measure(copy.server(runner), runner, files)

        for said in in_copies(jobs, [measuring(*batch) for batch in records.batches(todo)]):
            print(said, flush=True)
    return records


def read_settings() -> argparse.Namespace:
    """Read the settings of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of faults, or what they begin with")
    parser.add_argument("--from", nargs="+", type=Path, default=LISTS, dest="lists", metavar="TOML")
    parser.add_argument("--unit", action="store_true", help="unit tests only: minutes")
    parser.add_argument("--again", action="store_true", help="also those with an outcome")
    parser.add_argument("--survivors", action="store_true", help="again those that survived")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def is_to_be_tried(outcome: Outcome | None, *, unit_only: bool) -> bool:
    """Return whether to try it: by unit tests if new, by engine tests if those let it pass."""
    if outcome is None:
        return unit_only
    return not unit_only and outcome.by is None and outcome.stage.startswith(UNIT)


def main() -> None:
    """Try the faults that were not tried yet."""
    settings = read_settings()
    faults = read_faults(settings.lists)
    if settings.only:
        faults = [fault for fault in faults if fault.name.startswith(tuple(settings.only))]
    outcomes = {} if settings.again else known_outcomes(RESULTS, faults)
    if settings.survivors:
        outcomes = {name: one for name, one in outcomes.items() if one.by}
    for unit_only in (True,) if settings.unit else (True, False):
        todo = [
            fault
            for fault in faults
            if is_to_be_tried(outcomes.get(fault.name), unit_only=unit_only)
        ]
        if todo:
            records = make_records((UNIT,) if unit_only else (UNIT, *ENGINE), settings.jobs)
            planting = Planting(records, unit_only=unit_only)
            tried = list(try_all(planting, todo, settings.jobs))
            outcomes |= {outcome.name: outcome for outcome in tried}
            check_those_that_caught(tried)
    report(faults, outcomes)
    sys.exit(any(one.by is None for one in outcomes.values()))


def try_all(planting: Planting, todo: list[Fault], jobs: int) -> Iterator[Outcome]:
    """Yield outcomes as they come; save and print each."""
    tasks = [
        partial(planting.try_fault, fault, number) for number, fault in enumerate(todo, start=1)
    ]
    with RESULTS.open("a") as results:
        for count, outcome in enumerate(in_copies(jobs, tasks), start=1):
            results.write(json.dumps(asdict(outcome)) + "\n")
            results.flush()
            verdict = f"{outcome.stage}: {outcome.by}" if outcome.by else "SURVIVED"
            took = f"{outcome.seconds:.0f} s"
            print(f"{count}/{len(todo)} {outcome.name}: {verdict} ({took})", flush=True)
            yield outcome


def check_those_that_caught(tried: list[Outcome]) -> None:
    """Print which of the tests now fail without a fault as well: they have caught nothing."""
    with copied() as copy:
        for runner in RUNNERS:
            caught = (one.by for one in tried if one.stage.endswith("v2") == (runner == "v2"))
            tests = sorted({name for name in caught if name and "::" in name})
            while tests:
                files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
                failed = copy.server(runner).run(Request(files, tests, arguments=["-x"])).failed
                if failed is None:
                    break
                print(f"fails without a fault as well, on {runner}: {failed}", flush=True)
                tests = [name for name in tests if not failed.startswith(name)]


if __name__ == "__main__":
    main()
