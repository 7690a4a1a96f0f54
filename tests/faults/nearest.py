"""Find the tests that execute a function, measured once; the quickest first.

A record is kept for each test file and each model runner, in build/executed. A record of unit tests
is renewed when the tests or something that they execute has changed. A record of engine tests,
which take an hour in total, is renewed only when the tests have changed: to find tests, it stays
good for longer.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from faults.executed import digest, record_of
from faults.fork_server import ForkServer, Request
from faults.source import Function, PackageSource

RUNNERS = ("v1", "v2")
UNIT = "unit"
ENGINE = ("engine", "server", "cluster")
"""Folders of tests that start engines."""
OF_ONE_RUNNER = ("server", "cluster")
NOT_TRIED = ("tests/unit/test_planted_faults.py",)
"""They fail with any fault planted, because its edit no longer fits."""
SLOWER = 6.0
"""A test may take a minute plus this many times its measured time."""


@dataclass(frozen=True)
class MeasuredTest:
    """One test on one runner."""

    runner: str
    name: str
    seconds: float

    @property
    def file(self) -> str:
        """File of the test."""
        return self.name.partition("::")[0]

    @property
    def kind(self) -> str:
        """`unit`, or one of ENGINE."""
        return self.name.split("/")[1]


@dataclass(frozen=True)
class Record:
    """What a test file executes on one runner, with digests of that time."""

    runner: str
    file: str
    told: dict[str, Any]

    @property
    def kind(self) -> str:
        """`unit`, or one of ENGINE."""
        return self.file.split("/")[1]

    def is_fresh(self, root: Path, *, sources_too: bool) -> bool:
        """Return whether its tests are unchanged and, with `sources_too`, what they execute."""
        sources = self.told["sources"] if sources_too else {}
        known = {self.file: self.told["digest"], **sources}
        return all(digest(root / file) == before for file, before in known.items())

    def tests(self) -> list[MeasuredTest]:
        """Return all tests, also those that did not pass."""
        return [
            MeasuredTest(self.runner, one["name"], one["seconds"]) for one in self.told["tests"]
        ]

    def passing(self, numbers: Iterable[int] | None = None) -> list[MeasuredTest]:
        """Return tests of these numbers, or all, that passed without a fault."""
        tests, told = self.tests(), self.told["tests"]
        chosen = range(len(tests)) if numbers is None else numbers
        return [tests[number] for number in chosen if told[number]["passed"]]


class Records:
    """All records of a project."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder

    def files(self, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return runner and file of all tests of these kinds."""
        found = []
        for kind in kinds:
            for path in sorted((self.root / "tests" / kind).rglob("test_*.py")):
                runners = RUNNERS[:1] if kind in OF_ONE_RUNNER else RUNNERS
                found += [(runner, str(path.relative_to(self.root))) for runner in runners]
        return [(runner, file) for runner, file in found if file not in NOT_TRIED]

    def read(self, runner: str, file: str) -> Record | None:
        """Return a record, if it was made."""
        path = record_of(self.folder, runner, file)
        return Record(runner, file, json.loads(path.read_text())) if path.exists() else None

    def stale(self, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return runner and file of records to make."""
        found = []
        for runner, file in self.files(kinds):
            record = self.read(runner, file)
            sources_too = file.split("/")[1] == UNIT
            if record is None or not record.is_fresh(self.root, sources_too=sources_too):
                found.append((runner, file))
        return found

    def batches(self, todo: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Return runner and files of tests to run together: unit tests by folder, others alone."""
        found: dict[tuple[str, str], list[str]] = {}
        for runner, file in todo:
            at = str(Path(file).parent) if file.split("/")[1] == UNIT else file
            found.setdefault((runner, at), []).append(file)
        return [(runner, files) for (runner, _), files in found.items()]

    def measure(self, server: ForkServer, runner: str, files: list[str]) -> str:
        """Run and watch the tests of a clean copy.

        Returns:
            A message about it.
        """
        paths = [record_of(self.folder, runner, file) for file in files]
        for path in paths:
            path.unlink(missing_ok=True)
        arguments = ["-p", "faults.executed", f"--executed={self.folder}"]
        ended = server.run(Request(files, arguments=arguments, limit=900.0))
        for file, path in zip(files, paths, strict=True):
            if not path.exists():  # nothing on this runner, or its tests were killed
                path.parent.mkdir(parents=True, exist_ok=True)
                empty = {"digest": digest(self.root / file), "tests": [], "functions": {}}
                path.write_text(json.dumps({**empty, "lines": {}, "sources": {}}))
        where = files[0] if len(files) == 1 else Path(files[0]).parent
        failed = f"; not used, for it fails: {ended.failed}" if ended.failed else ""
        return f"measured {where} on {runner} in {ended.seconds:.0f} s{failed}"

    @cached_property
    def all(self) -> list[Record]:
        """All records, as they are now."""
        found = (self.read(*one) for one in self.files((UNIT, *ENGINE)))
        return [record for record in found if record is not None]

    def executing(self, functions: list[Function]) -> list[MeasuredTest]:
        """Return tests that execute one of these functions."""
        keys = {function.key for function in functions}
        found = []
        for record in self.all:
            executed = record.told["functions"]
            numbers = sorted({number for key in keys & executed.keys() for number in executed[key]})
            found += record.passing(numbers)
        return found

    def reaching(self, file: str, lines: set[int]) -> set[tuple[str, str]]:
        """Return runner and file of tests that execute one of these lines in the unchanged file."""
        now = digest(self.root / file)
        return {
            (one.runner, one.file)
            for one in self.all
            if one.told["sources"].get(file) == now and lines & set(one.told["lines"][file])
        }

    def of_folder(self, folder: str) -> list[MeasuredTest]:
        """Return all tests below a folder."""
        records = [one for one in self.all if one.file.startswith(folder)]
        return [test for one in records for test in one.passing()]

    def mentioning(self, words: set[str]) -> list[MeasuredTest]:
        """Return tests of files in which one of these words occurs."""
        texts = {one.file: (self.root / one.file).read_text() for one in self.all}
        files = {file for file, text in texts.items() if any(word in text for word in words)}
        return [test for file in sorted(files) for test in self.of_folder(file)]


def nearest(records: Records, source: PackageSource, file: str, planted: str) -> list[MeasuredTest]:
    """Return tests that execute what an edit of a file changes.

    If none was seen to, because another process does or numba compiled it: tests that execute what
    mentions it, else those of the file, else those that mention its name.
    """
    edited = source.edited(file, planted)
    entries = source.entries(edited) or source.functions.get(file, [])
    return (
        records.executing(entries)
        or records.executing(source.mentioning({one.own_name for one in entries}))
        or records.executing(source.functions.get(file, []))
        or records.mentioning({one.own_name for one in edited} | {Path(file).stem})
    )


def quickest(
    tests: list[MeasuredTest], cap: float, first: Container[tuple[str, str]] = ()
) -> list[MeasuredTest]:
    """Return tests in the order of their files' total times, until the total exceeds the cap.

    Tests of a file stay together, because they share engines.

    Args:
        first: runner and file of tests that come before all others.
    """
    by_file: dict[tuple[str, str], list[MeasuredTest]] = {}
    for test in tests:
        by_file.setdefault((test.runner, test.file), []).append(test)
    seconds = {one: sum(test.seconds for test in those) for one, those in by_file.items()}
    chosen: list[MeasuredTest] = []
    left = cap
    for one in sorted(by_file, key=lambda one: (one not in first, seconds[one])):
        if chosen and seconds[one] > left:
            continue
        left -= seconds[one]
        chosen += by_file[one]
    return chosen


def request_for(tests: list[MeasuredTest]) -> Request:
    """Return a request to run these tests until one fails."""
    return Request(
        files=list(dict.fromkeys(test.file for test in tests)),
        tests=[test.name for test in tests],
        limits={test.name: 60 + SLOWER * test.seconds for test in tests},
        arguments=["-x"],
    )
