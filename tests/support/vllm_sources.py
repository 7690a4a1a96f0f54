"""Definitions and parameters in vLLM's sources, which are parsed and never imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class MissingError(LookupError):
    """vLLM's sources do not define this name."""


class Sources:
    """A folder with vLLM's Python files."""

    def __init__(self, folder: Path) -> None:
        """`folder` contains a folder `vllm`. Files are read on first use.

        `from x import *` and names made at run time are not found.
        """
        self._folder = folder
        self._tree = cache(lambda file: ast.parse(file.read_text()))
        self._keys = cache(lambda file: {*_keys_of_dicts(self._tree(file))})

    def _file(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        files = path.with_suffix(".py"), path / "__init__.py"
        return next((file for file in files if file.exists()), None)

    def has(self, path: str) -> bool:
        """Whether `from module import name` works, or `envs` has such a variable."""
        module, _, name = path.partition(":")
        if (file := self._file(module)) is None:
            return False
        # Environment variables and lazily imported names are keys of a dictionary.
        if name in self._keys(file):
            return True
        try:
            return module != "vllm.envs" and bool(self._top(module, name))
        except MissingError:
            return self._file(f"{module}.{name}") is not None

    def _top(self, module: str, name: str) -> tuple[Path, ast.stmt]:
        """File and definition of a module's top-level name, following imports from vLLM."""
        if (file := self._file(module)) is None:
            raise MissingError(f"there is no {module}")
        found = _named(self._tree(file).body, name)
        if found is None:
            raise MissingError(f"{module} has no {name}")
        if isinstance(found, ast.ImportFrom) and (found.level or found.module.startswith("vllm")):  # type: ignore[union-attr]
            (alias,) = (one for one in found.names if name == (one.asname or one.name))
            parents = module.split(".")[: 1 - found.level - (file.name != "__init__.py") or None]
            origin = ".".join([*(parents if found.level else []), *filter(None, [found.module])])
            if not self._file(f"{origin}.{alias.name}"):
                return self._top(origin, alias.name)
        return file, found

    def find(self, path: str) -> tuple[Path, ast.stmt]:
        """File and definition of `module:attribute`; the attribute may be inherited."""
        module, _, attribute = path.partition(":")
        first, *rest = attribute.split(".")
        file, node = self._top(module, first)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            file, node = self._top(module, ast.unparse(node.value.func))  # an object's class
        for name in rest:
            file, node = self._member(file, node, name)
        return file, node

    def _module(self, file: Path) -> str:
        return ".".join(file.relative_to(self._folder).with_suffix("").parts)

    def _member(self, file: Path, owner: ast.stmt, name: str) -> tuple[Path, ast.stmt]:
        if found := _named(getattr(owner, "body", ()), name):
            return file, found
        module = self._module(file)
        for base in _names_of_bases(owner):
            try:
                return self._member(*self._top(module, base), name)
            except MissingError:
                continue
        raise MissingError(f"{getattr(owner, 'name', module)} has no {name}")


def _names_of_bases(owner: ast.stmt) -> list[str]:
    return [ast.unparse(base).split("[")[0] for base in getattr(owner, "bases", ())]


def _keys_of_dicts(tree: ast.Module) -> Iterator[Any]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))


def _statements(body: Iterable[Any]) -> Iterator[ast.stmt]:
    """Statements of a body, including those inside `if` and `try`."""
    for node in body:
        if not isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield node
            continue
        for part in ("body", "handlers", "orelse"):
            yield from _statements(getattr(node, part, ()))


def _named(body: Iterable[ast.stmt], name: str) -> ast.stmt | None:
    """The last definition of a name, or else its last assignment or import."""
    found = None
    for node in _statements(body):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        names = {getattr(one, "id", None) for one in targets}
        if isinstance(node, ast.ImportFrom):
            names = {one.asname or one.name for one in node.names}
        names.add(getattr(node, "name", None))
        if name in names and (isinstance(node, DEFINITIONS) or not isinstance(found, DEFINITIONS)):
            found = node
    return found


def parameters_of(node: ast.stmt) -> str | None:
    """Parameter names of a function, separated by spaces; None for anything else."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    if "property" in map(ast.unparse, node.decorator_list):
        return None
    of = node.args
    given = [*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg]
    return " ".join(one.arg for one in given if one)


def imported_by(files: Iterable[Path]) -> set[frozenset[str]]:
    """Names that these files import from vLLM, as `module:name`; one of each set has to exist."""
    needed = set()
    for file in files:
        tree = ast.parse(file.read_text())
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
        caught = [one for one in tries if "ImportError" in ast.unparse(one.handlers[0].type or one)]
        in_a_try = {id(inner) for one in caught for inner in ast.walk(one)}
        alone = (node for node in ast.walk(tree) if id(node) not in in_a_try)
        needed |= {frozenset({name}) for node in alone for name in _imports(node)}
        needed |= {frozenset(n for i in ast.walk(one) for n in _imports(i)) for one in caught}
    return needed - {frozenset()}


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
        yield from (f"{node.module}:{one.name}" for one in node.names)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "envs":
        yield f"vllm.envs:{node.attr}"
