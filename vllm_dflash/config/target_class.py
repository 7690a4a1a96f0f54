"""What the class of a target can do, asked without importing it.

An import of some starts CUDA: flash-linear-attention asks for the device's name. From then on vLLM
starts its engine as a new process where it would have forked, and a script with `LLM(...)` and no
`if __name__ == "__main__"` runs a second time in it. What vLLM itself asks, it asks in a child, and
keeps; hidden states are not among it. So the source is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_dflash.vllm_sources import Sources

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def hands_out_hidden_states(target: ModelConfig) -> bool:
    """Whether vLLM can take taps of this target. Yes where nobody knows: its worker then says so.

    Of vLLM's own classes the source is read; others may be built in any way.
    """
    import vllm
    from vllm.model_executor.models.interfaces import SupportsEagle3, supports_eagle3

    found = target.registry.models.get(target.architecture)
    if (loaded := getattr(found, "model_cls", None)) is not None:
        return supports_eagle3(loaded)
    module = getattr(found, "module_name", "")
    sources, base = Sources(Path(vllm.__file__).parents[1]), SupportsEagle3.__name__
    return not module.startswith("vllm.") or sources.inherits(f"{module}:{found.class_name}", base)
