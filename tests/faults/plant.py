"""Plant one fault after the other, and see whether the tests notice.

    make faults                                   # all of them; goes on where it was broken off
    make faults ARGS="--only v1-context-one-late"
    make faults ARGS="--unit --from FILE.toml"    # unit tests alone, faults of another list

Each is planted in a copy of the project, and the nearest tests run there, quick ones first, until
one fails: unit tests that execute the faulty function, other unit tests of that room, then engine
tests that execute it. What passes them all has survived.
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

from faults.copied import BUILD, ROOT, Copy, in_copies
from faults.fault import LISTS, Fault, read_faults
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
from faults.source import PackageSource

RESULTS = BUILD / "faults.jsonl"
NEAREST_UNIT_S = 300.0
OTHER_UNIT_S = 60.0
ENGINE_S = 240.0
"""What the tests of a stage may take together, as measured without a fault."""


def stages(
    fault: Fault, records: Records, source: PackageSource
) -> Iterator[tuple[str, list[MeasuredTest]]]:
    """Tests to run, the nearest first, by the name of their stage."""
    tests = nearest(records, source, fault.file, fault.planted(ROOT))
    units = [test for test in tests if test.kind == UNIT]
    room = (*Path(fault.file).parts[1:-1], "test_")[0]
    others = [test for test in records.of_folder(f"tests/unit/{room}") if test not in set(units)]
    engines = [test for test in tests if test.kind in ENGINE]
    for name, those, cap in (
        (UNIT, units, NEAREST_UNIT_S),
        (UNIT, others, OTHER_UNIT_S),
        ("engine", engines, ENGINE_S),
    ):
        chosen = quickest(those, cap)
        for runner in RUNNERS:
            if of_runner := [test for test in chosen if test.runner == runner]:
                yield name + " v2" * (runner == "v2"), of_runner


class Planting:
    """Tries faults, one at a time in each copy."""

    def __init__(self, records: Records, *, unit_only: bool):
        self.records, self.unit_only = records, unit_only
        self.source = PackageSource(ROOT)

    def try_fault(self, fault: Fault, number: int, before: Outcome | None, copy: Copy) -> Outcome:
        """Run the tests nearest to it; behind unit tests that let it pass before, engines alone."""
        started = time.monotonic()
        is_known = before is not None and before.stage.startswith(UNIT)
        stage = before.stage if before is not None and is_known else UNIT
        with copy.planted(fault, number):
            for name, tests in stages(fault, self.records, self.source):
                is_unit = name.startswith(UNIT)
                if (is_unit and is_known) or (not is_unit and self.unit_only):
                    continue
                stage = name
                ended = copy.server(tests[0].runner).run(request_for(tests))
                if ended.failed or ended.code not in (0, 5):
                    by = ended.failed or f"pytest ended with {ended.code}"
                    return self._outcome(fault, by, name, started)
        if not self.unit_only and stage.startswith(UNIT):
            stage = "engine"  # there is none
        return self._outcome(fault, None, stage, started)

    @staticmethod
    def _outcome(fault: Fault, by: str | None, stage: str, started: float) -> Outcome:
        return Outcome(fault.name, by, stage, round(time.monotonic() - started), print_of(fault))


def make_records(kinds: tuple[str, ...], jobs: int, *, strictly: bool = False) -> Records:
    """What tests of these kinds execute, measured where it was not yet."""
    records = Records(ROOT, BUILD / "executed")
    if todo := records.stale(kinds, strictly=strictly):
        print(f"what {len(todo)} files of tests execute is measured first", flush=True)

        def measuring(runner: str, files: list[str]) -> Callable[[Copy], str]:
            return lambda copy: records.measure(copy.server(runner), runner, files)

        for said in in_copies(jobs, [measuring(*batch) for batch in records.batches(todo)]):
            print(said, flush=True)
    return records


def read_settings() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of faults, or what they begin with")
    parser.add_argument("--from", nargs="+", type=Path, default=LISTS, dest="lists", metavar="TOML")
    parser.add_argument("--unit", action="store_true", help="unit tests only: minutes")
    parser.add_argument("--again", action="store_true", help="also those with an outcome")
    parser.add_argument("--survivors", action="store_true", help="again those that survived")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def is_done(outcome: Outcome, settings: argparse.Namespace) -> bool:
    """Whether there is nothing more to be tried."""
    if outcome.by is not None:
        return True
    return not settings.survivors and (settings.unit or not outcome.stage.startswith(UNIT))


def main() -> None:
    """Try what was not tried yet."""
    settings = read_settings()
    faults = read_faults(settings.lists)
    if settings.only:
        faults = [fault for fault in faults if fault.name.startswith(tuple(settings.only))]
    outcomes = {} if settings.again else known_outcomes(RESULTS, faults)
    done = {name for name, one in outcomes.items() if is_done(one, settings)}
    todo = [fault for fault in faults if fault.name not in done]
    if todo:
        records = make_records((UNIT,) if settings.unit else (UNIT, *ENGINE), settings.jobs)
        before = {} if settings.survivors else outcomes
        planting = Planting(records, unit_only=settings.unit)
        with RESULTS.open("a") as results:
            tasks = [
                partial(planting.try_fault, fault, number, before.get(fault.name))
                for number, fault in enumerate(todo, start=1)
            ]
            for count, outcome in enumerate(in_copies(settings.jobs, tasks), start=1):
                outcomes[outcome.name] = outcome
                results.write(json.dumps(asdict(outcome)) + "\n")
                results.flush()
                verdict = f"{outcome.stage}: {outcome.by}" if outcome.by else "SURVIVED"
                took = f"{outcome.seconds:.0f} s"
                print(f"{count}/{len(todo)} {outcome.name}: {verdict} ({took})", flush=True)
    report(faults, outcomes)
    sys.exit(any(one.by is None for one in outcomes.values()))


if __name__ == "__main__":
    main()
