"""A pytest plugin that records which functions and lines of the package each test executes.

    pytest tests/unit -p faults.executed --executed build/executed

writes a file for each test file. What a module's or a session's fixture executes counts for every
test that uses it. Processes that a test starts are watched as well, if they end by themselves.
What numba compiles is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from coverage import Coverage, CoverageData

from faults.source import FOLDERS, Function, function_at, functions_in

CHILDREN = """
[run]
source = {sources}
data_file = {folder}/of_children
parallel = true
sigterm = true
context = ${{EXECUTED_BY}}
disable_warnings = no-data-collected,module-not-measured
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--executed", type=Path, help="folder for what tests executed")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Executed(config.rootpath, config.getoption("--executed")))


def digest(path: Path) -> str:
    """Return the digest of a file's text; empty if there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def record_of(folder: Path, runner: str, test_file: str) -> Path:
    """Return the path of a test file's record on a runner."""
    return folder / runner / test_file.replace("/", ".").replace(".py", ".json")


class Executed:
    """Watches tests, and writes the records when the session ends."""

    def __init__(self, root: Path, folder: Path):
        self.root, self.folder = root, folder
        sources = [str(root / folder) for folder in FOLDERS]
        self.coverage = Coverage(data_file=None, source=sources, config_file=False)
        self.temporary = Path(tempfile.mkdtemp(prefix="executed-"))
        settings = self.temporary / "children.ini"
        settings.write_text(CHILDREN.format(sources=",".join(sources), folder=self.temporary))
        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: dict[str, set[str]] = defaultdict(set)
        self.fixtures: dict[str, list[str]] = {}
        """Fixtures that each test shares with others."""
        self.coverage.start()

    def _switch(self, context: str) -> str:
        """Count for another context from now on.

        Returns:
            The previous context.
        """
        before = os.environ.get("EXECUTED_BY", "")
        os.environ["EXECUTED_BY"] = context
        self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        info = getattr(item, "_fixtureinfo", None)
        definitions = [those[-1] for those in info.name2fixturedefs.values()] if info else []
        shared = [_context(one) for one in definitions if one.scope != "function"]
        self.fixtures[item.nodeid] = shared
        self._switch(item.nodeid)
        try:
            return (yield)
        finally:
            self._switch("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(_context(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.outcomes[report.nodeid].add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.coverage.stop()
        found = [self.coverage.get_data(), *map(_read, self.temporary.glob("of_children.*"))]
        by_context: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for data in filter(None, found):
            for measured in data.measured_files():
                if measured.startswith(str(self.root)):
                    file = str(Path(measured).relative_to(self.root))
                    for line, contexts in data.contexts_by_lineno(measured).items():
                        for context in contexts:
                            by_context[context][file].add(line)
        runner = session.config.getoption("--runner")
        for test_file in sorted({nodeid.partition("::")[0] for nodeid in self.seconds}):
            path = record_of(self.folder, runner, test_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self._record(test_file, by_context)))
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _record(self, test_file: str, by_context: dict[str, dict[str, set[int]]]) -> dict[str, Any]:
        names = [name for name in self.seconds if name.partition("::")[0] == test_file]
        lines: dict[str, set[int]] = defaultdict(set)
        functions: dict[str, set[int]] = defaultdict(set)
        for number, name in enumerate(names):
            for context in (name, *self.fixtures.get(name, [])):
                for file, those in by_context.get(context, {}).items():
                    lines[file] |= those
                    for key in self._functions(file, those):
                        functions[key].add(number)
        tests = [
            {
                "name": name,
                "seconds": round(self.seconds[name], 3),
                "passed": self.outcomes[name] == {"passed"},
            }
            for name in names
        ]
        return {
            "digest": digest(self.root / test_file),
            "tests": tests,
            "functions": {key: sorted(numbers) for key, numbers in functions.items()},
            "lines": {file: sorted(numbers) for file, numbers in lines.items()},
            "sources": {file: digest(self.root / file) for file in lines},
        }

    def _functions(self, file: str, lines: set[int]) -> set[str]:
        functions = _functions_of(self.root, file)
        of_lines = (function_at(functions, line, in_body=True) for line in lines)
        return {function.key for function in of_lines if function}


@cache
def _functions_of(root: Path, file: str) -> list[Function]:
    return functions_in(file, (root / file).read_text())


def _context(fixture: Any) -> str:
    return f"{fixture.baseid}::{fixture.argname}"


def _read(path: Path) -> CoverageData | None:
    """Return what a process wrote; None if it was ended while writing."""
    data = CoverageData(str(path))
    try:
        data.read()
    except Exception:
        return None
    return data
