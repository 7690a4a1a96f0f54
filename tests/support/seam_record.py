"""Check that vLLM's sources, parsed and never imported, have all that vllm_dflash relies on."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

from support import ROOT
from support.seam_table import SEAMS, paths_of
from support.vllm_sources import DEFINITIONS, MissingError, Sources, imported_by, parameters_of

RECORDS = ROOT / "vllm_dflash" / "seams"
Record = dict[str, Any]
"""`seams`: parameters and hash of each, by part. `names`: all else we import from vLLM that is
there, by part."""
PACKAGE = ROOT / "vllm_dflash"
ROOMS = {
    "config": "front_end",
    "engine": "worker",
    "model": "worker",
    "cluster": "ray",
    "engine/v1": "v1",
    "engine/v2": "v2",
}
"""Part whose imports are those of a folder or file. Imports of all others are in `rest`."""


def _entry(file: Path, node: ast.stmt) -> Record:
    """Return a function's parameters, a class's abstract methods, and a hash of the text without
    docstrings and comments."""
    lines = dict(enumerate(file.read_text().splitlines()[: node.end_lineno], start=1))
    for inner in (one for one in ast.walk(node) if isinstance(one, DEFINITIONS)):
        if ast.get_docstring(inner, clean=False) is not None:
            for number in range(inner.body[0].lineno, (inner.body[0].end_lineno or 0) + 1):
                lines[number] = ""
    text = [lines[number].strip() for number in range(node.lineno, len(lines) + 1)]
    code = "\n".join(line for line in text if line and not line.startswith("#"))
    entry = {
        "parameters": parameters_of(node),
        "body": hashlib.sha256(code.encode()).hexdigest()[:12],
    }
    abstract = [
        one.name
        for one in getattr(node, "body", ())
        if "abstractmethod" in map(ast.unparse, getattr(one, "decorator_list", ()))
    ]
    return entry | ({"abstract": abstract} if abstract else {})


def imported() -> dict[str, set[frozenset[str]]]:
    """Return what vllm_dflash imports from vLLM, as `module:name`, by part; one of each set is
    enough."""
    files: dict[str, list[Path]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE)
        rooms = [one.as_posix() for one in (path, *path.parents)]
        part = next((ROOMS[one] for one in rooms if one in ROOMS), "rest")
        files.setdefault(part, []).append(file)
    return {part: imported_by(files[part]) for part in sorted(files)}


def examine(sources: Sources) -> tuple[Record, list[str]]:
    """Return what to record of a version, and a line for each thing that is missing."""
    found: Record = {part: {} for part in SEAMS}
    names, missing = {}, []
    for part in SEAMS:
        for path in paths_of(part):
            try:
                found[part][path] = _entry(*sources.find(path))
            except MissingError as error:
                missing.append(f"missing    {path} ({error})")
    for part, needed in imported().items():
        there = names[part] = sorted(n for n in frozenset().union(*needed) if sources.has(n))
        gone = [one for one in needed if one.isdisjoint(there)]
        missing += [f"missing    {' or '.join(sorted(one))}" for one in gone]
    return {"seams": found, "names": names}, sorted(missing)


def entries(record: Record) -> Record:
    """Return the seams of all parts of a record."""
    return {path: one for part in record["seams"].values() for path, one in part.items()}
