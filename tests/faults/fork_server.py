"""A process that has imported what tests need, and forks a child for each test run.

Importing PyTorch, vLLM and the like takes 10 to 20 s; running the tests nearest to a function often
takes less than one. The server imports everything except the package and its tests. The child
imports these from the copy of the project in which the server was started, as it is by then.

A request is a line of JSON (`Request`), and so is its answer (`Ended`).
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import pytest

IMPORTED = {
    "v1": (
        "numba",
        "hypothesis",
        "transformers",
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.spec_decode.dflash",
        "vllm.v1.core.sched.async_scheduler",
        "vllm.model_executor.models.qwen3",
    ),
    "v2": ("vllm.v1.worker.gpu.model_runner",),
}
"""Modules by runner. V2 needs those of V1 as well."""
PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
"""Plugins of pytest that tests need."""


@dataclass(frozen=True)
class Request:
    """Tests to run."""

    files: list[str]
    tests: list[str] | None = None
    """Only these, in this order; None: all tests of the files."""
    limits: dict[str, float] = field(default_factory=dict)
    """Seconds that a test may take."""
    arguments: list[str] = field(default_factory=list)
    """More arguments for pytest."""
    limit: float = 180.0
    """Limit of tests without one, and for finding tests."""


@dataclass(frozen=True)
class Ended:
    """Outcome of a test run."""

    code: int | None
    """pytest's exit code; None if it was killed or died."""
    failed: str | None
    """The first test or test file that failed; for a child that hung or died, where it was."""
    seconds: float


class ForkServer:
    """The server process, as its parent sees it."""

    def __init__(self, copy: Path, runner: str, log: Path):
        paths = [str(copy), str(copy / "tests"), str(copy / "benchmarks")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faults.fork_server", runner, str(log)],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, request: Request) -> Ended:
        """Run tests of the copy.

        Raises:
            RuntimeError: the server is dead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise RuntimeError("the fork server died")
        return Ended(**json.loads(answer))

    def end(self) -> None:
        """End the server and its children."""
        self.process.terminate()
        self.process.wait()


def serve(runner: str, log: Path) -> None:
    """Answer requests until there are no more."""
    # Whatever is printed while importing and testing goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_what_is_needed(runner)
    for line in sys.stdin:
        ended = _run_in_child(runner, Request(**json.loads(line)), log)
        print(json.dumps(asdict(ended)), file=answers, flush=True)


def _import_what_is_needed(runner: str) -> None:
    runpy.run_path("tests/conftest.py")  # sets what vLLM reads while it is imported
    if runner == "v2":
        runpy.run_path("tests/support/interpreter.py")["use_model_runner_v2"]()
    for name in IMPORTED["v1"] + IMPORTED["v2"] * (runner == "v2"):
        importlib.import_module(name)
    ours = {"vllm_dflash", "support", "conftest"}
    assert not [name for name in sys.modules if name.partition(".")[0] in ours]


def _run_in_child(runner: str, request: Request, log: Path) -> Ended:
    started = time.monotonic()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        os.close(reading)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os._exit(_test(runner, request, os.fdopen(writing, "w")))
        finally:
            os._exit(3)
    os.close(writing)

    def end(*_: object) -> None:
        _kill(child)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    code: int | None = None
    failed: str | None = None
    running = "pytest, before any test,"
    for word, told in _told(reading, request):
        if word == "starts":
            running = told
        elif word == "failed":
            failed = failed or told
        elif word == "ended":
            code = int(told)
    os.close(reading)
    _kill(child)
    os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if code is None and failed is None:
        failed = f"{running} hung or died"
    return Ended(code, failed, round(time.monotonic() - started, 1))


def _kill(child: int) -> None:
    """Kill the child and all processes it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)


def _told(reading: int, request: Request) -> Iterator[tuple[str, str]]:
    """Yield the child's messages until it ends or a test exceeds its limit."""
    limit, unread = request.limit, b""
    until = time.monotonic() + limit
    while select.select([reading], [], [], max(0.0, until - time.monotonic()))[0]:
        if not (more := os.read(reading, 65536)):
            return
        *lines, unread = (unread + more).split(b"\n")
        for line in lines:
            word, _, told = line.decode().partition(" ")
            yield word, told
            if word == "ended":
                return
            if word == "starts":
                limit = request.limits.get(told, request.limit)
                until = time.monotonic() + limit


class Chosen:
    """A plugin that runs the requested tests in their order and reports their outcomes."""

    def __init__(self, tests: list[str] | None, told: IO[str]):
        self.tests, self.told = tests, told

    def tell(self, word: str, about: object) -> None:
        """Send a message to the server."""
        print(word, about, file=self.told, flush=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.tests is not None:
            places = {name: place for place, name in enumerate(self.tests)}
            items[:] = [item for item in items if item.nodeid in places]
            items.sort(key=lambda item: places[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("starts", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)


def _test(runner: str, request: Request, told: IO[str]) -> int:
    """Run the tests, in the child."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Looking for plugins in all installed packages takes longer than most tests.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    arguments = [f"-p{name}" for name in ("no:cacheprovider", *PLUGINS)]
    arguments += ["-q", "--timeout=0", f"--runner={runner}"]
    chosen = Chosen(request.tests, told)
    code = pytest.main([*arguments, *request.arguments, *request.files], plugins=[chosen])
    chosen.tell("ended", int(code))
    sys.stdout.flush()
    return int(code)


if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
