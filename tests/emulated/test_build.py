"""The device is compiled once for each set of sources; if it cannot be, the reason is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from emulated import build


def test_a_machine_without_a_compiler_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = build.why_not()
    assert reason is not None
    assert "no C++ compiler" in reason
    build.library().touch()  # compiled while there was a compiler
    assert build.why_not() is None


def test_other_sources_are_compiled_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "device"
    shutil.copytree(build.SOURCES, sources)
    before = build.library()
    monkeypatch.setattr(build, "SOURCES", sources)
    assert build.library() == before
    with (sources / "queues.h").open("a") as file:
        file.write("// more\n")
    assert build.library() != before


def test_what_does_not_compile_is_told_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "device.cpp").write_text("#error nothing here\n")
    with pytest.raises(RuntimeError, match="nothing here"):
        build.build()
    assert [*(tmp_path / "cache").iterdir()] == []


def test_tests_are_skipped_there_and_say_why(tmp_path: Path) -> None:
    nothing = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", __file__, "--emulated", "-k", "compiled_anew"]
    done = subprocess.run(command, env=os.environ | nothing, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "1 skipped" in done.stdout
    assert "no C++ compiler (g++) to compile the emulated device with" in done.stdout
