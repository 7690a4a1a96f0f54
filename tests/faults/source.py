"""Functions in the source that faults are planted in: their lines, and the names they mention."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = (
    "vllm_dflash",
    "benchmarks/loads",
    "benchmarks/parity",
    "benchmarks/reference",
    "examples/ray_engines",
)
"""Folders that faults are planted in."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Function:
    """One function or method."""

    file: str
    """Relative to the project."""
    name: str
    """`Class.method`, `outer.inner`."""
    first: int
    """Line of the first decorator, or of `def`."""
    body: int
    last: int
    is_compiled: bool
    """Compiled by numba: nothing that watches Python sees it run."""
    mentions: frozenset[str]

    @property
    def key(self) -> str:
        """Key, unique among all functions of the project."""
        return f"{self.file}::{self.name}"

    @property
    def own_name(self) -> str:
        """Name without its class."""
        return self.name.rpartition(".")[2]


def mentioned(node: ast.AST) -> frozenset[str]:
    """Return the names and attributes that occur in a node."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return frozenset(names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)})


def functions_in(file: str, text: str) -> list[Function]:
    """Return all functions of a file; one that contains another comes before it."""
    return list(_inside(file, ast.parse(text), ""))


def _inside(file: str, parent: ast.AST, prefix: str) -> Iterator[Function]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, DEFINITIONS):
            decorators = frozenset().union(*map(mentioned, node.decorator_list))
            yield Function(
                file,
                prefix + node.name,
                min(one.lineno for one in (node, *node.decorator_list)),
                node.body[0].lineno,
                node.end_lineno or node.lineno,
                "compiled" in decorators,
                mentioned(node),
            )
        inner = prefix
        if isinstance(node, (*DEFINITIONS, ast.ClassDef)):
            inner = f"{prefix}{node.name}."
        yield from _inside(file, node, inner)


def function_at(functions: list[Function], line: int, *, in_body: bool = False) -> Function | None:
    """Return the innermost function with this line; `in_body`: not in decorators or signature."""
    holding = [f for f in functions if (f.body if in_body else f.first) <= line <= f.last]
    return holding[-1] if holding else None


def edited_lines(before: str, after: str) -> set[int]:
    """Return the lines of `before` that an edit changes; for an insertion, the line before it."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    lines: set[int] = set()
    for tag, start, end, _, _ in matcher.get_opcodes():
        if tag != "equal":
            lines |= set(range(start + 1, end + 1)) or {start}
    return lines


def names_set_at(text: str, lines: set[int]) -> set[str]:
    """Return the names that statements outside of functions set there: constants, fields."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and lines & set(
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= set().union(*map(mentioned, targets))
    return names


class PackageSource:
    """All functions in FOLDERS, and which mention which."""

    def __init__(self, root: Path):
        self.root = root
        self.functions: dict[str, list[Function]] = {}
        for path in sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py")):
            file = str(path.relative_to(root))
            self.functions[file] = functions_in(file, path.read_text())

    def mentioning(self, names: set[str]) -> list[Function]:
        """Return functions in which one of these names occurs, except the one of that name."""
        return [
            one
            for those in self.functions.values()
            for one in those
            if names & one.mentions - {one.own_name}
        ]

    def entries(self, functions: list[Function]) -> list[Function]:
        """Return these functions; for compiled ones, the Python functions that lead to them."""
        found: dict[str, Function] = {}
        waiting, seen = list(functions), set()
        while waiting:
            one = waiting.pop()
            if one.key in seen:
                continue
            seen.add(one.key)
            if one.is_compiled:
                waiting += self.mentioning({one.own_name})
            else:
                found[one.key] = one
        return list(found.values())

    def edited(self, file: str, planted: str) -> list[Function]:
        """Return functions that an edit changes; for a constant or a field, those that read it.

        Empty if no function of the package mentions it.
        """
        text = (self.root / file).read_text()
        here = self.functions.get(file, [])
        lines = edited_lines(text, planted)
        found = {line: function_at(here, line) for line in lines}
        functions = {one.key: one for one in found.values() if one is not None}
        outside = {line for line, one in found.items() if one is None}
        if outside and (names := names_set_at(text, outside)):
            functions |= {one.key: one for one in self.mentioning(names)}
        return list(functions.values())
