"""The folder for estimates is tried before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_dflash.config.pair import usable_folder


def test_it_is_made_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for written, meant in (("a/b", "a/b"), ("~/kept", "home/kept"), (str(tmp_path / "c"), "c")):
        for _ in range(2):
            assert usable_folder(written) == str(tmp_path / meant)
        assert list((tmp_path / meant).iterdir()) == []


@pytest.mark.parametrize("written", ["file", "file/below", "/proc/dflash", "a\0b", "~no one/a"])
def test_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(ValueError, match=r"nothing can be written there.* Name a") as refused:
        usable_folder(written)
    assert f"estimates_folder is {written!r}" in str(refused.value)


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is written as a test: root has permission even if the disk refuses."""

    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_dflash.config.pair.TemporaryFile", full)
    with pytest.raises(ValueError, match="No space left on device"):
        usable_folder(str(tmp_path))
