"""A process that answers: what travels, how its death is told, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import importing_support
from vllm_dflash.tools import engine_process
from vllm_dflash.tools.engine_log import errors_in
from vllm_dflash.tools.engine_process import EngineDied, EngineProcess, temporary_logs

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a process that answers as `answering.py` does."""

    def start(**arguments: Any) -> EngineProcess:
        return EngineProcess(
            tmp_path / "logs" / "log",
            start="support.answering:start",
            environment=importing_support(),
            folder=str(tmp_path),
            **arguments,
        )

    return start


def is_gone(group: int) -> bool:
    """Whether a group of processes ends and is reaped, also where init waits for a core."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


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


def test_errors_of_a_log() -> None:
    log = (
        "(Worker pid=7) WARNING 11-21 09:10:00 [cpu.py:3] ValueError: is no error's line\n"
        "ValueError is not what this is\n"
        "(Worker pid=7) ERROR 11-21 09:10:00 [mp.py:8]   File 'model.py', line 3, in load\n"
        "(Worker pid=7) ERROR 11-21 09:10:00 [mp.py:8] safetensors_rust.SafetensorError: short\n"
        "(EngineCore pid=6) Traceback (most recent call last):\n"
        "(EngineCore pid=6)   raise ValueError: no\n"
        "(EngineCore pid=6) Exception\n"
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: vllm.exceptions.VLLMValidationError: must be non-negative\n"
        "Traceback (most recent call last):\n"
        "RuntimeError: Engine core initialization failed.\n"
        "RuntimeError: Engine core initialization failed.\n"
    )
    assert errors_in(log) == [
        "safetensors_rust.SafetensorError: short",
        "Exception",
        "vllm.exceptions.VLLMValidationError: must be non-negative",
        "RuntimeError: Engine core initialization failed.",
    ]


def test_a_killed_child_is_noticed_and_leaves_no_process(start: Start) -> None:
    with start() as child:
        child.ask("start_process")
        group = child._process.pid
        os.kill(group, signal.SIGKILL)
        with pytest.raises(EngineDied):
            child.ask("double", number=4)
        os.killpg(group, 0)  # the process it started is still there
    assert is_gone(group)


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
    monkeypatch.setattr(engine_process, "SECONDS_TO_STOP", 1.0)  # it waits for a process that stays

    def interrupt() -> None:
        while not (tmp_path / "hanging").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    with start(hangs=starting) as child:
        group = child._process.pid
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            child.ask("hang")
    assert is_gone(group)
    assert "KeyboardInterrupt" in (tmp_path / "logs" / "log").read_text()


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
