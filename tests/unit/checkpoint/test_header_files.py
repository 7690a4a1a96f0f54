"""Headers: what each says about its tensors, and where they come from."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError
from safetensors.torch import save_file

from vllm_dflash.checkpoint.headers import (
    BITS,
    INDEX,
    Headers,
    HeadersNotCheckedError,
    HeadersUnreadableError,
    Tensor,
    read_folder,
    read_headers,
)

MATRIX, ROW = Tensor((3, 5), "BF16"), Tensor((7,), "I64")
REPOSITORY = "someone/drafter"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two files of one tensor each, and an index that names both."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_file({"row": torch.zeros(7, dtype=torch.int64)}, folder / "b.safetensors")
    save_file({"matrix": torch.zeros(3, 5, dtype=torch.bfloat16)}, folder / "a.safetensors")
    write_index(folder, {"matrix": "a.safetensors", "row": "b.safetensors"})
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


FOUND = Headers(("a.safetensors", "b.safetensors"), {"matrix": MATRIX, "row": ROW})


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "is_floating"),
    [
        ("F64", 192, True),
        ("BF16", 48, True),
        ("F8_E4M3", 24, True),
        ("BOOL", 24, False),
        ("F4", 12, True),
    ],
)
def test_a_tensors_size_and_kind(dtype: str, num_bytes: int, is_floating: bool) -> None:
    tensor = Tensor((2, 3, 4), dtype)
    assert (tensor.count, tensor.num_bytes, tensor.is_floating) == (24, num_bytes, is_floating)
    assert Tensor((), "F32").count == 1
    assert Tensor((2,), "bfloat16").is_floating
    assert not Tensor((2,), "int8").is_floating


def test_which_files_of_a_folder_count(folder: Path) -> None:
    write_index(folder, {"matrix": "a.safetensors"})
    assert read_folder(folder) == Headers(("a.safetensors",), {"matrix": MATRIX})
    (folder / INDEX).unlink()
    assert read_folder(folder) == FOUND


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(HeadersNotCheckedError, match=f"^'{tmp_path}' holds no"):
        read_folder(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "folder"])
def test_a_damaged_file_is_named(folder: Path, damage: str) -> None:
    file = folder / "b.safetensors"
    whole = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    else:
        file.write_bytes({"cut": whole[:-1], "text": b"version https", "empty": b""}[damage])
    with pytest.raises(HeadersUnreadableError, match=f"^'{file}' cannot be read: "):
        read_folder(folder)


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"x": "c.safetensors", "y": "a.safetensors"}, "lacks 'c.safetensors', which"),
        (
            {"x": "sub/a.safetensors", "y": "a.safetensors"},
            "it names 'sub/a.safetensors', but only",
        ),
        ({"x": "../a.safetensors"}, r"it names '\.\./a\.safetensors', but only"),
        ({"x": ["a.safetensors"]}, r"it names \"\['a.safetensors'\]\", but only"),
        ({"x": "n" * 300 + ".safetensors"}, r"lacks 'n{299}\.\.\. \(314 characters\), which"),
        ({"x": "a.safetensors\0.safetensors"}, r"lacks 'a\.safetensors.x00\.safetensors', which"),
        ({str(n): f"{n:05}.bin" for n in range(10**4)}, "'00009.bin' and 9990 more, but only"),
        ({}, "it names no files"),
    ],
)
def test_an_index_that_does_not_fit(folder: Path, weight_map: dict[str, Any], words: str) -> None:
    write_index(folder, weight_map)
    with pytest.raises(HeadersUnreadableError, match=words) as refused:
        read_folder(folder)
    assert str(refused.value).startswith(f"'{folder}")
    assert len(str(refused.value)) < 1000


def test_an_index_without_end(folder: Path) -> None:
    """The file is not read into memory: a sparse file may claim any size."""
    with (folder / INDEX).open("r+b") as file:
        file.truncate(1 << 42)
    with pytest.raises(HeadersUnreadableError, match=f"{INDEX}' cannot be read: it is larger than"):
        read_folder(folder)


def test_an_index_that_is_no_text_is_not_shown(folder: Path) -> None:
    """A link may point to a file that others must not read."""
    (folder / INDEX).write_bytes(b"the secret itself \xff" * 1000)
    with pytest.raises(HeadersUnreadableError, match="cannot be read: it is not text") as refused:
        read_folder(folder)
    assert "secret" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{}", b'{"weight_map": [1]}', b"3", b"\xff", b"[" * 100_000]
)
def test_an_index_that_is_none(folder: Path, index: bytes) -> None:
    (folder / INDEX).write_bytes(index)
    with pytest.raises(HeadersUnreadableError, match=f"{INDEX}' cannot be read: "):
        read_folder(folder)


# --- repositories ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Record requests to a hub that serves FOUND. The cache is empty."""
    asked: list[tuple[str, str | None]] = []

    def get_safetensors_metadata(model: str, *, revision: str | None) -> Any:
        asked.append((model, revision))

        def of(name: str) -> Any:
            tensor = FOUND.tensors[name]
            info = SimpleNamespace(shape=list(tensor.shape), dtype=tensor.dtype)
            return SimpleNamespace(tensors={name: info})

        return SimpleNamespace(
            files_metadata={"b.safetensors": of("row"), "a.safetensors": of("matrix")}
        )

    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", get_safetensors_metadata)
    cached(monkeypatch, OSError("nothing there"))
    return asked


def cached(monkeypatch: pytest.MonkeyPatch, found: Path | Exception) -> None:
    def snapshot_download(model: str, *, revision: str | None, local_files_only: bool) -> str:
        assert (model, revision, local_files_only) == (REPOSITORY, "abc", True)
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)


def test_a_folder_needs_no_hub_and_a_repository_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    assert read_headers(str(folder)) == FOUND
    assert asked == []
    for missing in (OSError("no"), HFValidationError("no name")):
        cached(monkeypatch, missing)
        assert read_headers(REPOSITORY, "abc") == FOUND
    assert asked == [(REPOSITORY, "abc")] * 2


def test_the_cache_is_asked_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    write_index(folder, {"matrix": "a.safetensors"})
    cached(monkeypatch, folder)
    assert read_headers(REPOSITORY, "abc").files == ("a.safetensors",)
    # Without an index, only the name `model.safetensors` says that nothing is missing.
    (folder / INDEX).unlink()
    assert read_headers(REPOSITORY, "abc") == FOUND
    assert len(asked) == 1
    (folder / "b.safetensors").rename(folder / "model.safetensors")
    assert read_headers(REPOSITORY, "abc").files == ("a.safetensors", "model.safetensors")
    assert len(asked) == 1
    # A download that was interrupted.
    write_index(folder, {"matrix": "a.safetensors", "row": "b.safetensors"})
    assert read_headers(REPOSITORY, "abc") == FOUND
    assert len(asked) == 2


def test_a_type_of_tomorrow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    monkeypatch.delitem(BITS, "I64")
    for model in (str(folder), REPOSITORY):
        with pytest.raises(HeadersNotCheckedError, match=r"^tensor row is of unknown type I64$"):
            read_headers(model, "abc")
