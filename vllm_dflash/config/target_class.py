"""What the class of a target can do, asked without importing it.

An import of some starts CUDA: flash-linear-attention asks for the device's name. From then on vLLM
starts its engine as a new process where it would have forked, and a script with `LLM(...)` and no
`if __name__ == "__main__"` runs a second time in it. What vLLM itself asks, it asks in a child, and
keeps; hidden states are not among it. So the source is read.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def hands_out_hidden_states(target: ModelConfig) -> bool:
    """Whether vLLM can take taps of this target. Yes where nobody knows: its worker then says so.

    Of vLLM's own classes the source is read; others may be built in any way.
    """
    from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3

    found = target.registry.models.get(target.architecture)
    if (loaded := getattr(found, "model_cls", None)) is not None:
        return supports_eagle3(loaded)
    module = getattr(found, "module_name", "")
    return not module.startswith("vllm.") or _inherits(
        module, found.class_name, SupportsEagle3.__name__
    )


@cache
def _inherits(module: str, name: str, wanted: str) -> bool:
    """Whether the class of this name there has a base of that name, near or far."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    for node in ast.walk(ast.parse(Path(spec.origin).read_bytes())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return wanted in bases or any(_inherits(module, base, wanted) for base in bases)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    origin = resolve_name("." * node.level + (node.module or ""), spec.parent)
                    return _inherits(origin, alias.name, wanted)
    return False
