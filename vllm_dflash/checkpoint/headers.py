"""Names, shapes and types of a checkpoint's tensors; the weights themselves are never read."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Size of a number of each type of the safetensors format."""


class HeadersUnreadableError(ValueError):
    """A file that is damaged, or ought to be there; the message says what to do."""


class HeadersNotCheckedError(ValueError):
    """Headers that cannot be had here, say without a network; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """One tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it: BF16, F32, I64."""

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return self.count * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Headers:
    """All tensors of a checkpoint."""

    files: tuple[str, ...]
    tensors: dict[str, Tensor]

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(tensor.count for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Tensors of each type, the most frequent first."""
        return dict(Counter(t.dtype for t in self.tensors.values()).most_common())


def read_headers_of(model: str, revision: str | None = None) -> Headers:
    """Headers of a folder, of a repository in the local cache, or of one on the hub.

    Raises:
        HeadersUnreadableError: a file is missing, truncated, or no safetensors file.
        HeadersNotCheckedError: there are no safetensors, or the hub cannot be reached.
    """
    folder = Path(model) if Path(model).is_dir() else _cached(model, revision)
    if folder is not None:
        return read_folder(folder)
    return _read_hub(model, revision)


def read_folder(folder: Path) -> Headers:
    """Headers of the `*.safetensors` of a folder. Raises as `read_headers_of`."""
    from safetensors import SafetensorError, safe_open

    # As vLLM reads them: beside an index, other files hold the same weights once more.
    files = _indexed(folder) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise HeadersNotCheckedError(f"{str(folder)!r} holds no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            # Opening compares the header with the size of the file.
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - a method; the file is no mapping
                    part = opened.get_slice(name)
                    tensors[name] = _tensor(name, part.get_shape(), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise HeadersUnreadableError(
                f"{str(file)!r} cannot be read: {error}. It may be truncated, or a pointer of Git"
                " LFS: download it again."
            ) from error
    return Headers(tuple(file.name for file in files), tensors)


def _indexed(folder: Path) -> list[Path]:
    """The files an index names; none without an index. Refuses a folder that lacks one of them."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        named = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise HeadersUnreadableError(
            f"{str(index)!r} cannot be read: {error!r}. Download it again."
        ) from error
    missing = sorted(name for name in named if not (folder / name).is_file())
    if missing:
        raise HeadersUnreadableError(
            f"{str(folder)!r} lacks {', '.join(map(repr, missing))}, which {index.name} names:"
            " download them."
        )
    return [folder / name for name in sorted(named)]


def _tensor(name: str, shape: list[int], dtype: str) -> Tensor:
    if dtype not in BITS:
        raise HeadersNotCheckedError(f"tensor {name} is of unknown type {dtype}")
    return Tensor(tuple(shape), dtype)


def _cached(model: str, revision: str | None) -> Path | None:
    """The snapshot of a repository in the local cache, if all its weights are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, HFValidationError):
        return None
    try:
        return folder if _indexed(folder) or (folder / "model.safetensors").is_file() else None
    except HeadersUnreadableError:  # a download that was broken off; the hub has all of it
        return None


def _read_hub(model: str, revision: str | None) -> Headers:
    import huggingface_hub

    try:
        found = huggingface_hub.get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # whatever a network, a proxy or a hub may come up with
        raise HeadersNotCheckedError(
            f"the hub gave no headers of {model!r} ({_first_line(error)})"
        ) from error
    tensors = {
        name: _tensor(name, tensor.shape, tensor.dtype)
        for file in found.files_metadata.values()
        for name, tensor in file.tensors.items()
    }
    return Headers(tuple(sorted(found.files_metadata)), tensors)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
