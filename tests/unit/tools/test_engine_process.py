"""A process that answers: what is sent, how its death is reported, and that nothing remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import pytest

from support import importing_support
from support.waiting import wait_until
from vllm_dflash.tools import engine_process
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.engine_process import EngineDied, EngineProcess, temporary_logs

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a process that answers as `answering.py` does."""

    def start(log: str = "log", **arguments: Any) -> EngineProcess:
        return EngineProcess(
            tmp_path / "logs" / log,
            start="support.answering:start",
            environment=importing_support(),
            folder=str(tmp_path),
            **arguments,
        )

    return start


def is_gone(group: int) -> bool:
    """Whether a group of processes has ended and is reaped, which may be init's work."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_cache_size_is_not_overridden_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM prefers the variable on CPUs, and `scripts/run.sh` sets it."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    seen: list[dict[str, str]] = []

    def started(*_: Any, env: dict[str, str], **__: Any) -> Any:
        seen.append(env)
        return SimpleNamespace(stdin="", stdout="")

    monkeypatch.setattr(EngineProcess, "launch", staticmethod(started))
    side = make_sides("drafter", [])[0]
    side.start(tmp_path, model="target")
    side.start(tmp_path, model="target", kv_cache_memory_bytes=1)
    assert [env.get("VLLM_CPU_KVCACHE_SPACE") for env in seen] == ["1", None]


def test_answers_and_refusals(start: Start, tmp_path: Path) -> None:
    with start() as child:
        assert child.ask("double", number=4) == 8
        with pytest.raises(ValueError, match=r"^too\nmuch$"):
            child.ask("refuse", why="too\nmuch")
        answers: Any = child.answers
        assert answers.double(number=5) == 10
        assert not (tmp_path / "closed").exists()
    assert (tmp_path / "closed").exists()
    assert child._process.returncode == 0
    log = (tmp_path / "logs" / "log").read_text()
    assert log.count("printed while answering") == 2
    assert "in refuse" in log  # where it was raised


def test_a_refused_start(start: Start) -> None:
    with start(refusal="the pair does not fit") as child:
        with pytest.raises(ValueError, match=r"^the pair does not fit$"):
            child.ask("double", number=4)
        with pytest.raises(EngineDied, match="ValueError: the pair does not fit"):
            child.ask("double", number=4)
    assert child._process.returncode == 0


def test_a_death_names_the_root_cause_first(start: Start, tmp_path: Path) -> None:
    with start() as child:
        for _ in range(2):  # it stays dead
            with pytest.raises(EngineDied) as death:
                child.ask("fail")
    assert str(death.value).splitlines() == [
        "an engine died:",
        "  weights.LoadError: too short",
        "  RuntimeError: Engine core initialization failed.",
        f"its log: {tmp_path / 'logs' / 'log'}",
    ]


def test_a_death_without_an_error_shows_the_end_of_the_log(start: Start, tmp_path: Path) -> None:
    with start() as child, pytest.raises(EngineDied) as death:
        child.ask("leave")
    assert str(death.value).splitlines() == [
        "an engine died; the end of its log:",
        "  last words",
        f"its log: {tmp_path / 'logs' / 'log'}",
    ]


def test_a_killed_child_is_noticed_and_leaves_no_process(start: Start) -> None:
    with start() as child:
        child.ask("start_process")
        group = child._process.pid
        os.kill(group, signal.SIGKILL)
        with pytest.raises(EngineDied):
            child.ask("double", number=4)
        os.killpg(group, 0)  # the process it started is still there
    wait_until(lambda: is_gone(group), "no process of the group")


PARENT = """
import sys, time
from pathlib import Path
from support import importing_support
from vllm_dflash.tools.cli import main
from vllm_dflash.tools import engine_process
from vllm_dflash.tools.bench.sides import make_sides
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.demo import demo_command

folder, hangs = Path(sys.argv[1]), sys.argv[2] == "hangs"
arguments = {"folder": str(folder), "hangs": hangs, "patience": 0.1 if hangs else 60.0}
start, environment = "support.answering:start", importing_support()

def run_demo(parsed):
    with EngineProcess(folder / "log", start=start, environment=environment, **arguments) as child:
        (folder / "pid").write_text(str(child._process.pid))
        if not hangs:
            child.ask("double", number=4)
        (folder / "ready").touch()
        child.ask("hang") if hangs else time.sleep(600)

demo_command.run_demo = run_demo
engine_process.SECONDS_TO_STOP = 1.0
main(["demo", "--target", "t", "--drafter", "d"])
"""


@pytest.mark.parametrize("hangs", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed_takes_its_engines_with_it(
    tmp_path: Path, how: signal.Signals, hangs: bool
) -> None:
    """As after a time limit, a cancelled job, or running out of memory."""
    environment = os.environ | importing_support()
    command = [sys.executable, "-c", PARENT, str(tmp_path), "hangs" if hangs else "waits"]
    with subprocess.Popen(command, env=environment) as parent:
        wait_until((tmp_path / ("hanging" if hangs else "ready")).exists, "an engine")
        wait_until((tmp_path / "ready").exists, "a command that waits")
        parent.send_signal(how)
        group = int((tmp_path / "pid").read_text())
        wait_until(lambda: is_gone(group), "no process of the group")
    assert parent.returncode == (143 if how == signal.SIGTERM else -9)
    assert (tmp_path / "closed").exists() == (not hangs)  # an idle one closes


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Processes that a shell starts in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("starting", [True, False], ids=["starting", "answering"])
def test_interrupting_a_wait_leaves_no_process(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starting: bool
) -> None:
    log = tmp_path / "logs" / "log"
    main = threading.get_ident()

    def waits() -> bool:
        functions = (frame.f_code for frame, _ in walk_stack(sys._current_frames()[main]))
        return (tmp_path / "hanging").exists() and EngineProcess.ask.__code__ in functions

    def interrupt() -> None:
        wait_until(waits, "a question to a process that hangs")
        while waits():  # an interrupt right before the wait is not seen
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    with start(hangs=starting) as child:
        group, wait = child._process.pid, child._process.wait

        def run_out_of_patience(timeout: float | None = None) -> int:
            """Time out once the log shows the interrupt; wait if there is no time limit."""
            if timeout is None:
                return wait()
            assert timeout == engine_process.SECONDS_TO_STOP
            wait_until(lambda: "KeyboardInterrupt" in log.read_text(), "word of the interrupt")
            raise subprocess.TimeoutExpired("child", timeout)

        monkeypatch.setattr(child._process, "wait", run_out_of_patience)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes while the question waits
            threading.Thread(target=interrupt, daemon=True).start()
            child.ask("hang")
    wait_until(lambda: is_gone(group), "no process of the group")


@pytest.mark.usefixtures("_interruptible")
def test_dismissing_a_process_interrupts_its_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "SECONDS_TO_STOP", 0.1)
    with start(hangs=True) as slow, start(log="other") as quick:
        for child in (slow, quick):
            child.send("double", number=4)
        assert quick.receive() == 8
        wait_until((tmp_path / "hanging").exists, "a start that hangs")
        slow.dismiss()
        log = tmp_path / "logs" / "log"
        wait_until(lambda: "KeyboardInterrupt" in log.read_text(), "word of the interrupt")


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, EngineDied])
def test_logs_are_kept_where_an_engine_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    try:
        with temporary_logs("prefix-") as folder:
            (folder / "log").touch()
            if error is not None:
                raise error(folder / "log")
    except (ValueError, KeyboardInterrupt, EngineDied):
        pass
    assert [one.name.startswith("prefix-") for one in tmp_path.iterdir()] == (
        [True] if error is EngineDied else []
    )
