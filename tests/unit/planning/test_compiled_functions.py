"""Compiled functions: where they are kept, and that engines start if they cannot be kept."""

from pathlib import Path

import numpy as np
import pytest
from llvmlite.binding import ffi

from vllm_dflash.planning import compiled as room
from vllm_dflash.planning.compiled import compiled


def test_they_are_kept_by_the_sources_of_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key for all: a compiled function contains those that it calls, also from other files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("compiled.py", "other.py"):
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(room, "__file__", str(tmp_path / "compiled.py"))
    before = room._cache_folder()
    assert before.parent == tmp_path / "vllm_dflash"
    assert room._cache_folder() == before
    (tmp_path / "other.py").write_text("two")
    assert room._cache_folder() != before


def test_nobody_needs_a_place_to_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    monkeypatch.setattr(room, "FOLDER", str(nowhere / "folder"))
    assert compiled(lambda x: 2 * x)(21) == 42


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "FOLDER", str(tmp_path))
    twice = compiled(lambda x: 2 * x)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert twice(21) == 42


def test_nobody_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert room._cache_folder().name


def test_a_wrong_shape_is_an_error_and_nobodys_memory() -> None:
    with pytest.raises(IndexError):
        compiled(lambda values: values[3])(np.zeros(3))


def test_vllm_may_look_into_llvmlite() -> None:
    """`vllm.triton_utils.dispatcher` does so with every object of every module."""
    assert isinstance(vars(ffi.lib), dict)
