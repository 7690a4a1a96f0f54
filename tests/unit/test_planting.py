"""What plants faults: whose tests run, in which order, and what is heard of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from faults.fault import Fault
from faults.kept_code import _statements, digest_of
from faults.nearest import MeasuredTest, Records, nearest, quickest, request_for
from faults.outcome import Outcome, known_outcomes, print_of
from faults.plant import is_to_be_tried
from faults.source import PackageSource, edited_lines
from support import TESTS

MODULE = """\
from room.compiled import compiled

LIMIT = 3


@compiled
def inner(x):
    return x + 1


@compiled
def outer(x):
    return inner(x)


def plan(x):
    if x > LIMIT:
        return outer(x)
    return 0


class Other:
    def act(self):
        return 5
"""
TEST = """\
import subprocess, sys, time
import pytest
from room.module import Other, plan

@pytest.fixture(scope="module")
def planned():
    return plan(4)

def test_of_a_fixture(planned):
    pass

def test_act():
    assert Other().act() == 5

def test_of_another_process():
    subprocess.run([sys.executable, "-c", "from room.module import plan; plan(2)"], check=True)

def test_wrong():
    assert Other().act() == 6

def test_endless():
    time.sleep(60 * (plan(1) + 0))
"""
CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--runner", default="v1")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "vllm_dflash/__init__.py": "",
        "vllm_dflash/room/__init__.py": "",
        "vllm_dflash/room/compiled.py": "def compiled(function):\n    return function\n",
        "vllm_dflash/room/module.py": MODULE.replace("room.", "vllm_dflash.room."),
        "tests/conftest.py": CONFTEST,
        "tests/unit/room/test_module.py": TEST.replace("room.", "vllm_dflash.room."),
        "pyproject.toml": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


FILE = "vllm_dflash/room/module.py"
TEST_FILE = "tests/unit/room/test_module.py"


def run_in(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{project}{os.pathsep}{TESTS}"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, env=environment, capture_output=True, text=True
    )


def edited(project: Path, old: str, new: str) -> list[str]:
    text = (project / FILE).read_text()
    source = PackageSource(project)
    functions = source.edited(FILE, text.replace(old, new))
    return [function.name for function in source.entries(functions)]


def test_functions_that_an_edit_changes(project: Path) -> None:
    assert edited(project, "return 5", "return 6") == ["Other.act"]
    assert edited(project, "    if x > LIMIT", "    x += 1\n    if x > LIMIT") == ["plan"]
    # Of a constant, who reads it; of compiled functions, who leads to them.
    assert edited(project, "LIMIT = 3", "LIMIT = 4") == ["plan"]
    assert edited(project, "x + 1", "x + 2") == ["plan"]


def test_lines_that_an_edit_changes() -> None:
    assert edited_lines("a\nb\nc\n", "a\nB\nc\n") == {2}
    assert edited_lines("a\nb\nc\n", "a\nb\nx\nc\n") == {2}
    assert edited_lines("a\nb\nc\n", "a\n") == {2, 3}


@pytest.fixture
def records(project: Path) -> Records:
    folder = project / "executed"
    run_in(
        project,
        *("-m", "pytest", "tests", "-p", "faults.executed", f"--executed={folder}"),
    )
    return Records(project, folder)


def names(tests: list[MeasuredTest]) -> list[str]:
    return [test.name.partition("::")[2] for test in tests]


def test_the_nearest_tests_execute_what_is_edited(project: Path, records: Records) -> None:
    source = PackageSource(project)
    text = (project / FILE).read_text()

    def nearest_to(old: str) -> list[str]:
        return names(nearest(records, source, FILE, text.replace(old, "7")))

    # One that fails without a fault says nothing of one.
    assert nearest_to("5") == ["test_act"]
    # Those of a shared fixture, and of other processes, count.
    of_plan = ["test_of_a_fixture", "test_of_another_process", "test_endless"]
    assert nearest_to("x > LIMIT") == of_plan
    assert nearest_to("x + 1") == of_plan
    (line,) = [number for number, one in enumerate(text.splitlines(), 1) if "return 5" in one]
    assert records.reaching(FILE, {line}) == {("v1", TEST_FILE)}
    assert records.reaching(FILE, {2}) == set()


def test_records_are_made_anew_when_something_changes(project: Path, records: Records) -> None:
    v1 = ("v1", TEST_FILE)
    assert records.stale(("unit",)) == [("v2", TEST_FILE)]
    (project / FILE).write_text(MODULE + "\n")
    assert v1 in records.stale(("unit",))
    record = records.read(*v1)
    assert record is not None
    assert record.is_fresh(project, sources_too=False)
    (project / TEST_FILE).write_text("")
    assert not record.is_fresh(project, sources_too=False)


def test_files_that_take_the_least_come_first() -> None:
    tests = [
        MeasuredTest("v1", f"tests/unit/{name}.py::{n}", n) for name in "ab" for n in (1.0, 2.0)
    ]
    slow = MeasuredTest("v1", "tests/unit/a.py::slow", 10.0)
    chosen = quickest([slow, *tests], cap=5.0)
    assert [test.file for test in chosen] == ["tests/unit/b.py"] * 2
    assert len(quickest([slow, *tests], cap=100.0)) == 5
    # But for those that execute the very line.
    of_the_line = {("v1", "tests/unit/a.py")}
    assert quickest([slow, *tests], cap=100.0, first=of_the_line)[0] == slow
    assert quickest([slow], cap=5.0) == [slow]
    assert request_for(chosen).tests == [test.name for test in chosen]


def test_what_was_tried_is_not_tried_again(tmp_path: Path) -> None:
    fault = Fault("one", FILE, "", "a", "b")
    results = tmp_path / "results"

    def known(by: str | None, stage: str) -> Outcome | None:
        outcome = Outcome("one", by, stage, 1.0, print_of(fault))
        results.write_text(json.dumps(asdict(outcome)) + "\n" + '{"name": "of an older format"}\n')
        return known_outcomes(results, [fault]).get("one")

    def tried(outcome: Outcome | None) -> tuple[bool, bool]:
        by_units, by_engines = (is_to_be_tried(outcome, unit_only=x) for x in (True, False))
        return by_units, by_engines

    assert tried(known("a test", "unit")) == (False, False)
    assert tried(known(None, "unit v2")) == (False, True)
    assert tried(known(None, "engine v2")) == (False, False)
    # The edit is another one.
    other = Fault("one", FILE, "", "a", "c")
    assert known_outcomes(results, [other]) == {}
    assert tried(None) == (True, False)


FORKING = """
import json, sys
from pathlib import Path
from dataclasses import asdict
from faults.fork_server import Request, _run_in_child
for asked in json.loads(sys.argv[1]):
    print(json.dumps(asdict(_run_in_child("v1", Request(**asked), Path("log")))))
"""


def test_children_tell_who_failed_and_who_hangs(project: Path) -> None:
    file = project / TEST_FILE
    file.write_text(file.read_text().replace("+ 0", "+ 1"))
    name = f"{TEST_FILE}::test_".__add__
    wrong = {"files": [TEST_FILE], "tests": [name("wrong"), name("act")], "arguments": ["-x"]}
    asked = [
        {"files": [TEST_FILE], "tests": [name("act"), name("of_a_fixture")]},
        wrong,
        {"files": [TEST_FILE], "tests": [name("endless")], "limits": {name("endless"): 0.2}},
        {"files": [TEST_FILE], "tests": ["nowhere"]},
    ]
    done = run_in(project, "-c", FORKING, json.dumps(asked))
    assert done.returncode == 0, done.stderr
    right, failed, hung, nobody = map(json.loads, done.stdout.splitlines())
    assert (right["code"], right["failed"]) == (0, None)
    assert (failed["code"], failed["failed"]) == (1, name("wrong"))
    assert (hung["code"], hung["failed"]) == (None, f"{name('endless')} hung or died")
    assert (nobody["code"], nobody["failed"]) == (5, None)


def test_a_child_sees_the_file_as_it_is_then(project: Path) -> None:
    """And one that cannot be imported fails."""
    code = FORKING.replace("for asked", f"Path('{FILE}').write_text('x')\nfor asked")
    asked = [{"files": [TEST_FILE], "tests": [f"{TEST_FILE}::test_act"]}]
    done = run_in(project, "-c", code, json.dumps(asked))
    assert json.loads(done.stdout)["failed"] == TEST_FILE


def test_compiled_functions_are_kept_by_what_they_are_made_of(project: Path) -> None:
    folder, path = project / "vllm_dflash" / "room", project / FILE
    text = path.read_text()

    def changed_by(old: str, new: str) -> set[str]:
        _statements.cache_clear()
        before = {name: digest_of(folder, name) for name in ("inner", "outer", "plan")}
        path.write_text(text.replace(old, new))
        _statements.cache_clear()
        after = {name: digest_of(folder, name) for name in before}
        path.write_text(text)
        return {name for name in before if before[name] != after[name]}

    assert changed_by("x + 1", "x + 2") == {"inner", "outer", "plan"}
    assert changed_by("return inner(x)", "return inner(x) + 0") == {"outer", "plan"}
    assert changed_by("LIMIT = 3", "LIMIT = 4") == {"plan"}
    assert changed_by("return 5", "return 6") == set()
    assert changed_by("LIMIT = 3\n", "LIMIT = 3\n\n\n") == set()
