"""Whether a target's class provides hidden states, found without importing it.

Importing some classes initialises CUDA, because flash-linear-attention asks for the device's name.
vLLM then spawns its engine instead of forking it, and a script with `LLM(...)` but without
`if __name__ == "__main__"` runs again in the new process. vLLM inspects classes in a child process
and caches the result, but does not ask about hidden states. So we read the source.
"""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def provides_hidden_states(target: ModelConfig) -> bool:
    """Whether vLLM can read taps of this target. True if unknown: its worker then reports it.

    Only vLLM's own classes are read from source; others may be built in any way.
    """
    from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3

    found = target.registry.models.get(target.architecture)
    if (loaded := getattr(found, "model_cls", None)) is not None:
        return supports_eagle3(loaded)
    module = getattr(found, "module_name", "")
    if not module.startswith("vllm."):
        return True
    if _source_of(module) is None:  # a vLLM without its sources
        return True
    return _inherits(module, found.class_name, SupportsEagle3.__name__)


def _source_of(module: str) -> Path | None:
    """Return the file of a module or package of vLLM's; None if there is none."""
    import vllm

    path = Path(vllm.__file__).parents[1].joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in files if file.exists()), None)


def _inherits(module: str, name: str, wanted: str) -> bool:
    """Whether a class of vLLM's has a direct or indirect base of this name."""
    if name == wanted:
        return True
    file = _source_of(module)
    if file is None:  # not vLLM's
        return False
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = (ast.unparse(base).split("[")[0] for base in node.bases)
            return any(_inherits(module, base, wanted) for base in bases)
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if name == (one.asname or one.name):
                    origin = resolve_name("." * node.level + (node.module or ""), package)
                    return _inherits(origin, one.name, wanted)
    return False
