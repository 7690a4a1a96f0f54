"""A pretended GPU, for all that vLLM asks its driver about one."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
QUANTISED = (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)


class NoPasses:
    """Replaces vLLM's Inductor passes, which name compiled kernels."""

    def configure(self, config: object) -> None: ...


def stand_in(name: str, contents: tuple[str, ...] = ()) -> None:
    """Add an empty module of this name, with empty classes, for code that only imports it."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    for content in contents:
        setattr(module, content, type(content, (), {}))


def pretend_cuda() -> type[Any]:
    """Make CUDA vLLM's platform. Call before anything imports vLLM.

    Returns the platform. Its `capability` is not set yet: nothing that is imported before then may
    ask for it, so that a process can be forked for each capability.
    """
    for name in COMPILED:
        stand_in(name)
    passes = "vllm.compilation.passes.pass_manager"
    stand_in(passes)
    sys.modules[passes].PostGradPassManager = NoPasses  # type: ignore[attr-defined]
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PretendedCuda(CudaPlatformBase):
        capability: tuple[int, int]

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA, pretended"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def import_kernels(cls) -> None:
            pass

    assert platforms._current_platform is None, "vLLM has chosen its platform already"
    platforms._current_platform = PretendedCuda()
    from vllm import _custom_ops
    from vllm.vllm_flash_attn import flash_attn_interface

    for name in QUANTISED:  # called during imports; weights here are not quantised
        setattr(_custom_ops, name, lambda *args: False)
    flash_attn_interface.FA4_AVAILABLE = True  # a folder of vLLM's CUDA wheels
    return PretendedCuda
