"""The process that compiles planning while models load, replaced by another program."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vllm_dflash.engine import compile_aside
from vllm_dflash.engine.compile_aside import CompileAside, move_to_other_cores
from vllm_dflash.planning import rehearsal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where nothing is compiled yet."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(rehearsal, "FOLDER", str(folder))
    return folder


@pytest.fixture(autouse=True)
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Rehearsals that this process runs itself."""
    asked: list[tuple[str, int, int]] = []
    monkeypatch.setattr(compile_aside, "rehearse", lambda *sizes: asked.append(sizes))
    return asked


def runs_instead(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Path:
    """Replace Python with a script; its arguments are written to the returned file."""
    program, told = folder / "program", folder / "told"
    program.write_text(f'#!/bin/sh\necho "$@" > {told}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    return told


def test_a_first_start_compiles_for_its_runner_and_waits(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = rehearsal._note("v2")
    told = runs_instead(monkeypatch, tmp_path, f"sleep 0.3; touch {note}")
    CompileAside("v2").finish(7, 32)
    assert told.read_text().split() == ["-P", "-m", "vllm_dflash.planning.rehearsal", "v2"]
    assert rehearsal.is_rehearsed("v2")
    assert not rehearsal.is_rehearsed("v1")


@pytest.mark.parametrize(("own", "left"), [({0}, {1, 2, 3}), ({0, 1, 2, 3}, {0, 1, 2, 3})])
def test_it_keeps_off_the_cores_that_the_worker_is_bound_to(
    monkeypatch: pytest.MonkeyPatch, own: set[int], left: set[int]
) -> None:
    """vLLM compiles the models on those cores meanwhile."""
    bound: dict[int, set[int]] = {}
    cores = {0: own, os.getppid(): {0, 1, 2, 3}}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    move_to_other_cores(7)
    assert bound == {7: left}


def test_later_ones_start_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = runs_instead(monkeypatch, tmp_path, "")
    cache.mkdir()
    rehearsal._note("v1").touch()
    aside = CompileAside("v1")
    aside.finish(7, 32)
    aside.stop()
    assert not told.exists()


def test_nor_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = runs_instead(monkeypatch, tmp_path, "")
    (tmp_path / "file").touch()
    monkeypatch.setattr(rehearsal, "FOLDER", str(tmp_path / "file" / "cache"))
    CompileAside("v1").finish(7, 32)
    assert not told.exists()


def test_an_engine_that_ends_takes_it_along(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_instead(monkeypatch, tmp_path, "exec sleep 60")
    started, aside = time.monotonic(), CompileAside("v1")
    aside.stop()
    assert time.monotonic() - started < 30
    aside.finish(7, 32)


def test_nobody_waits_for_ever(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rehearsed: list[tuple[str, int, int]],
) -> None:
    runs_instead(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(compile_aside, "LONGEST_SECONDS", 0.2)
    started = time.monotonic()
    CompileAside("v1").finish(7, 32)
    assert time.monotonic() - started < 30
    assert rehearsed == [("v1", 7, 32)]


def test_of_several_workers_of_a_node_one_starts_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = runs_instead(monkeypatch, tmp_path, "")
    CompileAside("v1", starts=False).finish(7, 32)
    assert not told.exists()


def test_no_room_for_a_process_is_no_reason_not_to_start(
    cache: Path, monkeypatch: pytest.MonkeyPatch, rehearsed: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr("sys.executable", str(cache / "nothing"))
    CompileAside("v1").finish(7, 32)
    assert rehearsed == [("v1", 7, 32)]


def test_another_installation_is_not_taken_for_this_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not rehearsal.is_rehearsed("v1")  # creates the folder
    rehearsal._note("v1").touch()
    assert rehearsal.is_rehearsed("v1")
    monkeypatch.setattr("numba.__version__", "another")
    assert not rehearsal.is_rehearsed("v1")
