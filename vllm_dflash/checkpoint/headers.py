"""Names, shapes and types of a checkpoint's tensors, without reading the weights.

The check before an engine starts and `vllm-dflash inspect` both use it, so they see the same files.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from vllm_dflash.checkpoint.refusal import shown

INDEX = "model.safetensors.index.json"
MOST_INDEX_BYTES = 64 << 20
"""Size limit of an index. The largest models' (200,000 tensors) take 25 MB; parsed, far more."""
MOST_NAMED = 10
"""Maximum number of files that an error names."""
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits per number, for each type of the safetensors format."""


class HeadersError(ValueError):
    """The headers cannot be read; the message says why."""


class HeadersUnreadableError(HeadersError):
    """A file is damaged or missing; the message says what to do."""


class HeadersNotCheckedError(HeadersError):
    """The headers are not available here, for example without a network; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """One tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the type (BF16, F32, I64), or torch's if it is loaded (bfloat16)."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_floating(self) -> bool:
        """Whether it holds floating-point numbers of any width."""
        return self.dtype.upper().startswith(("F", "BF"))

    @property
    def num_bytes(self) -> int:
        """Size in the file, in bytes."""
        return self.count * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint."""

    files: tuple[str, ...]
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the files, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Number of tensors of each type, the most frequent first."""
        return dict(Counter(t.dtype for t in self.tensors.values()).most_common())


def read_headers(model: str, revision: str | None = None) -> Headers:
    """Headers of a folder, of a repository in the local cache, or of one on the hub.

    Raises:
        HeadersUnreadableError: a file is missing, truncated, or not a safetensors file.
        HeadersNotCheckedError: there are no safetensors files, or the hub cannot be reached.
    """
    folder = Path(model) if Path(model).is_dir() else _cached(model, revision)
    if folder is not None:
        return read_folder(folder)
    return _read_hub(model, revision)


def read_folder(folder: Path) -> Headers:
    """Headers of a folder's `*.safetensors` files. Raises like `read_headers`.

    If the folder has an index, only the files that it names, as in vLLM: others hold copies of the
    same weights (`consolidated.safetensors`).
    """
    from safetensors import SafetensorError, safe_open

    files = _indexed(folder) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise HeadersNotCheckedError(
            f"{str(folder)!r} holds no *.safetensors file. Download its weights into it; others,"
            " such as *.bin, may contain code and are not read: convert them"
            " (docs/checkpoints.md says how)"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():  # opening a pipe would block
            raise HeadersUnreadableError(f"{str(file)!r} cannot be read: it is not a file.")
        try:
            # Opening compares the header with the size of the file.
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - the file is not a mapping
                    part = opened.get_slice(name)
                    tensors[name] = _tensor(name, part.get_shape(), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise HeadersUnreadableError(
                f"{str(file)!r} cannot be read: {error}. It may be truncated, or a Git LFS pointer:"
                " download it again."
            ) from error
    return Headers(tuple(file.name for file in files), tensors)


def _indexed(folder: Path) -> list[Path]:
    """Files that a folder's index names, none without an index. Refuses if one is missing."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        with index.open("rb") as file:
            names = _names_in(file.read(MOST_INDEX_BYTES + 1), str(index))
        there = {*os.listdir(folder)}  # only these names are passed to the operating system
    except OSError as error:
        raise HeadersUnreadableError(f"{str(index)!r} cannot be read: {error}.") from error
    if missing := [name for name in names if name not in there or not (folder / name).exists()]:
        raise HeadersUnreadableError(
            f"{str(folder)!r} lacks {_shown(missing)}, which {INDEX} names: download them."
        )
    return [folder / name for name in names]


def _names_in(index: bytes, where: str) -> list[str]:
    """Files that an index names, all of them in its folder.

    The content is untrusted and may come from a link's target: no path leaves the folder, and
    messages show only the first names.
    """
    if len(index) > MOST_INDEX_BYTES:
        raise HeadersUnreadableError(
            f"{where!r} cannot be read: it is larger than {MOST_INDEX_BYTES >> 20} MiB. Download"
            " it again."
        )
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        # A decoding error would show all of the file.
        why = "it is not text" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise HeadersUnreadableError(
            f"{where!r} cannot be read: {why}. Download it again."
        ) from None
    odd = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if odd or not names:
        raise HeadersUnreadableError(
            f"{where!r} cannot be used: it names {_shown(odd) if odd else 'no files'}, but only"
            " *.safetensors files in its folder are allowed. Download it again."
        )
    return names


def _shown(names: Sequence[str]) -> str:
    """The first of these file names, for a message."""
    first = [shown(name) for name in names[:MOST_NAMED]]
    return ", ".join(first) + (f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED))


def _tensor(name: str, shape: list[int], dtype: str) -> Tensor:
    if dtype not in BITS:
        raise HeadersNotCheckedError(f"tensor {name} is of unknown type {dtype}")
    return Tensor(tuple(shape), dtype)


def _cached(model: str, revision: str | None) -> Path | None:
    """Snapshot of a repository in the local cache; None unless all its weights are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, HFValidationError):
        return None
    try:
        return folder if _indexed(folder) or (folder / "model.safetensors").is_file() else None
    except HeadersUnreadableError:  # an interrupted download; the hub has all files
        return None


def _read_hub(model: str, revision: str | None) -> Headers:
    import huggingface_hub

    try:
        found = huggingface_hub.get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # networks, proxies and hubs fail in many ways
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HeadersNotCheckedError(f"the hub returned no headers of {model!r} ({why})") from error
    tensors = {
        name: _tensor(name, tensor.shape, tensor.dtype)
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    return Headers(tuple(sorted(found.files_metadata)), tensors)
