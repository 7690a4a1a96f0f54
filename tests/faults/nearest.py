"""Which tests execute a function, measured once; the quickest first.

A record is kept for each file of tests and each model runner, in build/executed. One of unit tests
is made anew when the tests or something that they execute has changed. One of engine tests, which
take an hour all together, only when the tests have: to find tests by, it does for longer.
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
"""They fail of any fault: it no longer fits."""
SLOWER = 6.0
"""How many times the measured time a test may take, beside a minute."""


@dataclass(frozen=True)
class MeasuredTest:
    """One test on one runner."""

    runner: str
    name: str
    seconds: float

    @property
    def file(self) -> str:
        """In which it stands."""
        return self.name.partition("::")[0]

    @property
    def kind(self) -> str:
        """`unit`, or one of ENGINE."""
        return self.name.split("/")[1]


@dataclass(frozen=True)
class Record:
    """What a file of tests executes on one runner, and what it was like then."""

    runner: str
    file: str
    told: dict[str, Any]

    @property
    def kind(self) -> str:
        """`unit`, or one of ENGINE."""
        return self.file.split("/")[1]

    def is_fresh(self, root: Path, *, sources_too: bool) -> bool:
        """Whether its tests are as they were, and what they execute, if that matters."""
        sources = self.told["sources"] if sources_too else {}
        known = {self.file: self.told["digest"], **sources}
        return all(digest(root / file) == before for file, before in known.items())

    def tests(self) -> list[MeasuredTest]:
        """All, also those that did not pass."""
        return [
            MeasuredTest(self.runner, one["name"], one["seconds"]) for one in self.told["tests"]
        ]

    def passing(self, numbers: Iterable[int] | None = None) -> list[MeasuredTest]:
        """Tests of these numbers, or all, that passed without a fault."""
        tests, told = self.tests(), self.told["tests"]
        chosen = range(len(tests)) if numbers is None else numbers
        return [tests[number] for number in chosen if told[number]["passed"]]


class Records:
    """All that there are of a project."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder

    def files(self, kinds: tuple[str, ...]) -> list[tuple[str, str]]:
        """Runner and file of all tests of these kinds."""
        found = []
        for kind in kinds:
            for path in sorted((self.root / "tests" / kind).rglob("test_*.py")):
                runners = RUNNERS[:1] if kind in OF_ONE_RUNNER else RUNNERS
                found += [(runner, str(path.relative_to(self.root))) for runner in runners]
        return [(runner, file) for runner, file in found if file not in NOT_TRIED]

    def read(self, runner: str, file: str) -> Record | None:
        """One, if it was made."""
        path = record_of(self.folder, runner, file)
        return Record(runner, file, json.loads(path.read_text())) if path.exists() else None

    def stale(self, kinds: tuple[str, ...], *, strictly: bool = False) -> list[tuple[str, str]]:
        """Runner and file of those that have to be made; strictly: engine tests' like others'."""
        found = []
        for runner, file in self.files(kinds):
            record = self.read(runner, file)
            sources_too = strictly or file.split("/")[1] == UNIT
            if record is None or not record.is_fresh(self.root, sources_too=sources_too):
                found.append((runner, file))
        return found

    def batches(self, todo: list[tuple[str, str]]) -> list[tuple[str, list[str]]]:
        """Runner and files of tests to be run together: unit tests by folder, others alone."""
        found: dict[tuple[str, str], list[str]] = {}
        for runner, file in todo:
            at = str(Path(file).parent) if file.split("/")[1] == UNIT else file
            found.setdefault((runner, at), []).append(file)
        return [(runner, files) for (runner, _), files in found.items()]

    def measure(self, server: ForkServer, runner: str, files: list[str]) -> str:
        """Run tests of a clean copy, watched.

        Returns:
            What is to be said of it.
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
        """As they are now."""
        found = (self.read(*one) for one in self.files((UNIT, *ENGINE)))
        return [record for record in found if record is not None]

    def executing(self, functions: list[Function]) -> list[MeasuredTest]:
        """Tests that execute one of these."""
        keys = {function.key for function in functions}
        found = []
        for record in self.all:
            executed = record.told["functions"]
            numbers = sorted({number for key in keys & executed.keys() for number in executed[key]})
            found += record.passing(numbers)
        return found

    def reaching(self, file: str, lines: set[int]) -> set[tuple[str, str]]:
        """Runner and file of tests that execute one of these lines, where it stands as it did."""
        now = digest(self.root / file)
        return {
            (one.runner, one.file)
            for one in self.all
            if one.told["sources"].get(file) == now and lines & set(one.told["lines"][file])
        }

    def of_folder(self, folder: str) -> list[MeasuredTest]:
        """All tests below a folder."""
        records = [one for one in self.all if one.file.startswith(folder)]
        return [test for one in records for test in one.passing()]

    def mentioning(self, words: set[str]) -> list[MeasuredTest]:
        """Tests of files in which one of these words occurs."""
        texts = {one.file: (self.root / one.file).read_text() for one in self.all}
        files = {file for file, text in texts.items() if any(word in text for word in words)}
        return [test for file in sorted(files) for test in self.of_folder(file)]


def nearest(records: Records, source: PackageSource, file: str, planted: str) -> list[MeasuredTest]:
    """Tests that execute what an edit of a file changes.

    Where none was seen to, because another process does or numba compiled it: those that execute
    what mentions it, those of the file, those that mention its name.
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
    """Files in the order of what their tests take together, until that is more than the cap.

    Tests of a file stay together, for they share engines.

    Args:
        first: runner and file of those that come before all others.
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
    """Run these, until one fails."""
    return Request(
        files=list(dict.fromkeys(test.file for test in tests)),
        tests=[test.name for test in tests],
        limits={test.name: 60 + SLOWER * test.seconds for test in tests},
        arguments=["-x"],
    )
