"""What a run has finished: parts in a folder, each whole or absent.

A part is written under another name and then renamed. Its name follows from the rows it holds, so
a batch that is done twice, because an actor died behind it, takes its own place.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JSONL, PARQUET = "jsonl", "parquet"
FORMATS = (JSONL, PARQUET)
ABOUT = "run.json"
UNFINISHED = ".unfinished"
ID = "id"
Row = Mapping[str, Any]


def write_part(out: Path, rows: Sequence[Row], form: str) -> Path:
    """Write rows, each with an `id` of its own, to a part; all of them or none."""
    ids = json.dumps([str(row[ID]) for row in rows])
    path = out / f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.{form}"
    unfinished = path.with_name(path.name + UNFINISHED)
    if form == PARQUET:
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist([dict(row) for row in rows]), unfinished)
    else:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        unfinished.write_text("".join(lines), encoding="utf-8")
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())  # the name is not to survive a power cut that the rows do not
    os.replace(unfinished, path)
    return path


def read_parts(out: Path) -> list[dict[str, Any]]:
    """All rows of all parts, in the order of their ids as far as those have one."""
    rows: list[dict[str, Any]] = []
    for path in _parts(out):
        if path.suffix == f".{PARQUET}":
            from pyarrow import parquet

            rows += parquet.read_table(path).to_pylist()
        else:
            with path.open(encoding="utf-8") as file:
                rows += [json.loads(line) for line in file]
    return sorted(rows, key=lambda row: (isinstance(row[ID], str), row[ID]))


def finished_ids(out: Path) -> set[str]:
    """Ids of all rows in the parts, as text."""
    finished: set[str] = set()
    for path in _parts(out):
        if path.suffix == f".{PARQUET}":
            from pyarrow import parquet

            finished |= {str(i) for i in parquet.read_table(path, columns=[ID])[ID].to_pylist()}
        else:
            with path.open(encoding="utf-8") as file:
                finished |= {str(json.loads(line)[ID]) for line in file}
    return finished


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


def _parts(out: Path) -> list[Path]:
    return [path for form in FORMATS for path in sorted(out.glob(f"part-*.{form}"))]


def claim(out: Path, about: Mapping[str, Any]) -> None:
    """Make the folder this run's, or go on with it; what was left unfinished is removed.

    Raises:
        ValueError: it holds parts of a run with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / ABOUT
    if path.exists() and _parts(out):
        before = json.loads(path.read_text())
        now = json.loads(json.dumps(dict(about)))
        changed = [
            f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        if changed:
            raise ValueError(
                f"{out} holds another run: {'; '.join(changed)}. Choose another --out, or the"
                " settings of then to go on with it."
            )
    for unfinished in out.glob(f"*{UNFINISHED}"):
        unfinished.unlink()
    fresh = path.with_name(path.name + UNFINISHED)
    fresh.write_text(json.dumps(dict(about), indent=1))
    os.replace(fresh, path)
