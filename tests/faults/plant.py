"""Plant one fault after the other, and see whether the unit tests notice.

    make faults                                   # all of them; continues where it was interrupted
    make faults ARGS="--only v1-context-one-late"
    make faults ARGS="--from FILE.toml"           # faults of another list
    make faults ARGS="--only v1-a v2-b -- tests/engine/test_split_drafter.py"   # with other tests

Each fault is planted in a copy of the project, and tests run there until one fails: unit tests that
import the faulty module, then the other unit tests of its room. A fault that passes them all has
survived.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue

import pytest

from faults.fault import LISTS, Fault, read_faults

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
RESULTS = BUILD / "planted_faults.jsonl"
NOT_TRIED = "tests/unit/test_planted_faults.py"
"""Fails with any fault planted, because its edit no longer fits."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
ENVIRONMENT = {
    # Compiled faulty code is not cached where a user's is.
    "XDG_CACHE_HOME": str(BUILD / "faults-cache"),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of one fault."""

    name: str
    edit: list[str]
    """Its old and new text; an outcome of another edit does not count."""
    by: str | None
    """The first test that failed; None if the fault survived."""
    runner: str
    """Runner of that test, or of the last one tried."""


class Copy:
    """A copy of the project to plant faults in."""

    def __init__(self, folder: Path):
        """Copy every file that git knows or would add, as it is now."""
        self.project, self.log = folder / "project", folder / "log"
        self.deselected: list[str] = []
        """Options that leave out tests which fail without a fault as well."""
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (self.project / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.project / name)
        (self.project / ".venv").symlink_to(ROOT / ".venv")

    @contextmanager
    def planted(self, fault: Fault, number: int) -> Iterator[None]:
        """Plant a fault. The file's time is unique: compiled files are known by time and size."""
        path = self.project / fault.file
        path.write_text(fault.planted(ROOT))
        os.utime(path, (number, number))
        try:
            yield
        finally:
            shutil.copy2(ROOT / fault.file, path)

    def first_failure(self, runner: str, arguments: Sequence[str]) -> str | None:
        """Run pytest in the copy until a test fails; return that test."""
        paths = [str(self.project / folder) for folder in ("", "tests", "benchmarks")]
        fixed = ("-x", "-q", "--timeout=180", "--timeout-method=thread", f"--runner={runner}")
        with self.log.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *fixed, *arguments],
                cwd=self.project,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        code = process.wait()
        with suppress(ProcessLookupError):  # processes of a test that died
            os.killpg(process.pid, signal.SIGKILL)
        if code in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):  # none for the other runner
            return None
        if code == pytest.ExitCode.USAGE_ERROR:
            raise ValueError(self.log.read_text())
        found = FAILED.search(self.log.read_text())
        return found[1] if found else f"hung or died: pytest ended with {code}"

    def caught_by(
        self, fault: Fault, number: int, runner: str, arguments: Sequence[str]
    ) -> str | None:
        """Return the first test that fails with a fault and passes without."""
        options = [one for one in arguments if one.startswith("--")]
        while True:
            with self.planted(fault, number):
                by = self.first_failure(runner, [*arguments, *self.deselected])
            if by is None or "::" not in by or self.first_failure(runner, [*options, by]) is None:
                return by
            self.deselected.append(f"--deselect={by}")


def text_of(test: Path) -> str:
    """Return the text of a test and of the modules of `support` that it imports."""
    text = test.read_text()
    names = re.findall(r"from support\.(\w+) import", text)
    return "\n".join([text, *((ROOT / f"tests/support/{name}.py").read_text() for name in names)])


def unit_tests(fault: Fault) -> Iterator[list[str]]:
    """Yield the files of unit tests that import the faulty module; then the others of its room."""
    module = Path(fault.file).with_suffix("")
    imported = re.compile(rf"\b{re.escape('.'.join(module.parts[-2:]))}\b")
    package, *rooms = module.parts[:-1]
    room = (*rooms, "test_")[0] if package == "vllm_dflash" else package
    nearest, others = [], []
    for path in sorted((ROOT / "tests/unit").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        if imported.search(text_of(path)):
            nearest.append(file)
        elif file.startswith(f"tests/unit/{room}") and file != NOT_TRIED:
            others.append(file)
    yield from filter(None, (nearest, others))


def try_fault(copy: Copy, fault: Fault, number: int, arguments: list[str]) -> Outcome:
    """Run tests until one notices."""
    runners = ["v2", "v1"] if "/v2/" in fault.file else ["v1", "v2"]
    if "--emulated" in arguments:  # the choice is vLLM's
        runners = ["v1"]
    by, runner = None, ""
    for tests, runner in product([arguments] if arguments else unit_tests(fault), runners):
        if (by := copy.caught_by(fault, number, runner, tests)) is not None:
            break
    return Outcome(fault.name, [fault.old, fault.new], by, runner)


def try_all(faults: list[Fault], jobs: int, arguments: list[str]) -> Iterator[Outcome]:
    """Try faults, one at a time in each of `jobs` copies; yield and save outcomes as they come."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))

        def run(fault: Fault, number: int) -> Outcome:
            copy = copies.get()
            try:
                return try_fault(copy, fault, number, arguments)
            finally:
                copies.put(copy)

        running = [pool.submit(run, fault, number) for number, fault in enumerate(faults, start=1)]
        try:
            for done in as_completed(running):
                outcome = done.result()
                with RESULTS.open("a") as results:
                    results.write(json.dumps(asdict(outcome)) + "\n")
                yield outcome
        finally:
            pool.shutdown(cancel_futures=True)


def known_outcomes(faults: list[Fault]) -> dict[str, Outcome]:
    """Return outcomes of earlier runs, for faults that are still the same."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    edits = {fault.name: [fault.old, fault.new] for fault in faults}
    found = [Outcome(**json.loads(line)) for line in lines]
    return {one.name: one for one in found if edits.get(one.name) == one.edit}


def caught_in(outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """Return the files of the tests that caught faults, those of most faults first.

    A run without the other files would catch all of these faults, too.
    """
    files = Counter(one.by.partition("::")[0] for one in outcomes if one.by)
    return files.most_common()


def main() -> None:
    """Try the faults that were not tried yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of faults, or what they begin with")
    parser.add_argument("--from", nargs="+", type=Path, default=LISTS, dest="lists", metavar="TOML")
    parser.add_argument("--again", action="store_true", help="also those with an outcome")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, instead of unit tests")
    settings = parser.parse_args()
    faults = read_faults(settings.lists)
    if settings.only:
        faults = [fault for fault in faults if fault.name.startswith(tuple(settings.only))]
    BUILD.mkdir(exist_ok=True)
    outcomes = {} if settings.again or settings.pytest else known_outcomes(faults)
    todo = [fault for fault in faults if fault.name not in outcomes]
    for count, one in enumerate(try_all(todo, settings.jobs, settings.pytest), start=1):
        outcomes[one.name] = one
        print(f"{count}/{len(todo)} {one.name}: {one.by or 'SURVIVED'} ({one.runner})", flush=True)
    survivors = [fault for fault in faults if outcomes[fault.name].by is None]
    print(f"{len(faults) - len(survivors)} of {len(faults)} were caught")
    for file, count in caught_in(outcomes[fault.name] for fault in faults):
        print(f"{count} by {file}")
    for fault in survivors:
        print(f"survived: {fault.name} ({fault.file}): {fault.harm}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
