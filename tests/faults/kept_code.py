"""Numba's cache of compiled functions while faults are planted, keyed by each function's source.

The package keys them by the sources of the whole room `planning`, so an edit of one line recompiles
all of them. Here a function is recompiled only if it changed, or something it mentions, directly or
not. numba takes the class from NUMBA_CACHE_LOCATOR_CLASSES, in every process.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from numba.core import config
from numba.core.caching import UserProvidedCacheLocator

ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


class Statement(NamedTuple):
    """A statement of a module: a function, a constant, the fields of a class."""

    text: str
    mentions: frozenset[str]


def _mentioned(node: ast.AST) -> frozenset[str]:
    """Return the names and attributes that occur in a node."""
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return frozenset(names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)})


@cache
def _statements(folder: Path) -> dict[str, list[Statement]]:
    """Return the statements of all modules of a folder, by the name that they define."""
    found: dict[str, list[Statement]] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                node.body = [one for one in node.body if isinstance(one, ASSIGNMENTS)]
            named = [getattr(node, "name", None)]
            if isinstance(node, ASSIGNMENTS):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                named = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in filter(None, named):
                found.setdefault(name, []).append(Statement(ast.dump(node), _mentioned(node)))
    return found


def digest_of(folder: Path, name: str) -> str:
    """Return the digest of a function and of all that it mentions in its folder, by name."""
    statements = _statements(folder)
    waiting, seen = [name], set()
    while waiting:
        if (one := waiting.pop()) not in seen and one in statements:
            seen.add(one)
            waiting += [other for known in statements[one] for other in known.mentions]
    texts = [known.text for one in sorted(seen) for known in statements[one]]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


class KeptBySource(UserProvidedCacheLocator):
    """Keeps functions of `planning`; numba keeps others as usual."""

    def __init__(self, py_func: Callable[..., Any], py_file: str):
        super().__init__(py_func, py_file)
        self._digest = digest_of(Path(py_file).parent, py_func.__name__)
        self._cache_path = str(Path(config.CACHE_DIR).parent / "by_source")

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> KeptBySource | None:
        if not py_func.__module__.startswith("vllm_dflash.planning"):
            return None
        return super().from_function(py_func, py_file)
