"""Features of a target's class, found without importing it.

Importing some classes initialises CUDA, because flash-linear-attention asks for the device's name.
vLLM then spawns its engine instead of forking it, and a script with `LLM(...)` but without
`if __name__ == "__main__"` runs again in the new process. vLLM inspects classes in a child process
and caches the result, but does not ask about hidden states. So we read the source.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_dflash.vllm_sources import Sources

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def provides_hidden_states(target: ModelConfig) -> bool:
    """Whether vLLM can read taps of this target. True if unknown: its worker then reports it.

    Only vLLM's own classes are read from source; others may be built in any way.
    """
    import vllm
    from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3

    found = target.registry.models.get(target.architecture)
    if (loaded := getattr(found, "model_cls", None)) is not None:
        return supports_eagle3(loaded)
    module = getattr(found, "module_name", "")
    sources, base = Sources(Path(vllm.__file__).parents[1]), SupportsEagle3.__name__
    return not module.startswith("vllm.") or sources.inherits(f"{module}:{found.class_name}", base)
