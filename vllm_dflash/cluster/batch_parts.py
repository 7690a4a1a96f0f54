"""What a batch run has finished: parts in a folder, each whole or absent.

A part is written under another name and then renamed. Its name follows from the rows it holds, so
a batch that is done twice, because an actor died behind it, takes its own place.
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
    """Write rows, each with an `id` of its own, to a part; all of them or none."""
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
        os.fsync(file.fileno())  # the name is not to survive a power cut that the rows do not
    os.replace(unfinished, path)


def read_parts(out: Path) -> Iterator[dict[str, Any]]:
    """All rows of all parts, in no order."""
    for path in out.glob(f"part-*.{PARQUET}"):
        from pyarrow import parquet

        yield from parquet.read_table(path).to_pylist()
    for path in out.glob(f"part-*.{JSONL}"):
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def finished_ids(out: Path) -> set[str]:
    """Ids of all rows in the parts, as text."""
    return {str(row[ID]) for row in read_parts(out)}


def check_claimed(out: Path) -> None:
    """Where an engine runs: that it sees the folder `claim` was called with.

    Raises:
        ValueError: it does not, as on another machine.
    """
    if not (out / ABOUT).exists():
        raise ValueError(
            f"{out} on {socket.gethostname()} is not the folder this run was started with: put"
            " --out on storage that all nodes of the cluster share."
        )


def claim(out: Path, about: Mapping[str, Any]) -> None:
    """Make the folder this run's, or go on with it; what was left unfinished is removed.

    Args:
        out: the folder.
        about: what decides about the rows, as JSON can hold it.

    Raises:
        ValueError: it holds parts of a run with other settings.
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
                f"{out} holds another run: {'; '.join(changed)}. Choose another --out, or the"
                " settings of then to go on with it."
            )
    else:
        path.write_text(json.dumps(about, indent=1))
    for unfinished in out.glob(f"*{UNFINISHED}"):
        unfinished.unlink()
