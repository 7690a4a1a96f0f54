"""The finished parts of a batch run: files in a folder, each complete or absent.

A part is written under a temporary name and then renamed. Its name is a hash of its row ids, so a
batch that runs twice, because its actor died after writing it, overwrites its own part.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

JSONL, PARQUET = "jsonl", "parquet"
FORMATS = (JSONL, PARQUET)
ABOUT = "run.json"
UNFINISHED = ".unfinished"
ID = "id"


def write_part(out: Path, rows: Sequence[dict[str, Any]], form: str) -> None:
    """Write rows, each with a unique `id`, to one part: all of them or none."""
    ids = json.dumps([str(row[ID]) for row in rows])
    path = out / f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.{form}"
    unfinished = path.with_name(path.name + UNFINISHED)
    if form == PARQUET:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), unfinished)
    else:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        unfinished.write_text("".join(lines), encoding="utf-8")
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())  # a power cut must not leave the name without the rows
    os.replace(unfinished, path)


def read_parts(out: Path) -> Iterator[dict[str, Any]]:
    """Yield all rows of all parts, in no particular order."""
    for path in out.glob(f"part-*.{PARQUET}"):
        from pyarrow import parquet

        yield from parquet.read_table(path).to_pylist()
    for path in out.glob(f"part-*.{JSONL}"):
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def finished_ids(out: Path) -> set[str]:
    """Return the ids of all rows in the parts, as strings."""
    return {str(row[ID]) for row in read_parts(out)}


def check_claimed(out: Path) -> None:
    """Check, on an engine's machine, that `out` is the folder `claim` was called with.

    Raises:
        ValueError: it is not, for example on a machine that does not share the storage.
    """
    if not (out / ABOUT).exists():
        raise ValueError(
            f"{out} on {socket.gethostname()} is not the folder this run was started with: put"
            " --out on storage shared by all nodes of the cluster."
        )


def claim(out: Path, about: Mapping[str, Any]) -> None:
    """Mark the folder as this run's, or resume the run in it. Removes unfinished parts.

    Args:
        out: the folder.
        about: the settings that determine the rows, as JSON values.

    Raises:
        ValueError: the folder holds parts of a run with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / ABOUT
    if path.exists() and any(part.suffix != UNFINISHED for part in out.glob("part-*")):
        before = json.loads(path.read_text())
        changed = [
            f"{key} was {before.get(key)!r} and is {about.get(key)!r}"
            for key in sorted(before.keys() | about.keys())
            if before.get(key) != about.get(key)
        ]
        if changed:
            raise ValueError(
                f"{out} holds another run: {'; '.join(changed)}. Choose another --out, or use the"
                " old settings to resume that run."
            )
    else:
        path.write_text(json.dumps(about, indent=1))
    for unfinished in out.glob(f"*{UNFINISHED}"):
        unfinished.unlink()
