"""A GPU that is not there, as far as vLLM looks at one while it starts.

Ours are the answers of the driver (compute capability, name, memory) and empty modules that stand
for compiled kernels and for FlashInfer, so that what imports them can be imported. All that is
decided from there on, vLLM decides. Nothing can be run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from support import importing_support
from support.interpreter import use_triton

COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
IMPORTED = {
    "vllm.compilation.passes.pass_manager": ("PostGradPassManager",),  # it names compiled kernels
    "flashinfer": (
        "BatchAttentionWithAttentionSinkWrapper",
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "flashinfer.decode": ("fast_decode_plan", "trtllm_batch_decode_with_kv_cache"),
    "flashinfer.prefill": ("trtllm_batch_context_with_kv_cache",),
    "flashinfer.utils": ("FP4Tensor",),
}
"""What vLLM imports from where."""

QUANTISED = (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)


def fake_cuda() -> type[Any]:
    """From here on vLLM's platform is CUDA. Call before anything imports vLLM.

    Returns the platform, whose `capability` is yet to be set: nothing that is imported before may
    ask for it, so that a process can be forked for each capability.
    """
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # the choice is vLLM's
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # kernels are at hand: no download is tried
    use_triton()
    for name in COMPILED:
        _stand_in(name)
    for name, contents in IMPORTED.items():
        module = _stand_in(name)
        for content in contents:
            setattr(module, content, type(content, (), {}))

    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class FakedCuda(CudaPlatformBase):
        capability: tuple[int, int]

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*cls.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA, faked"

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
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def import_kernels(cls) -> None:
            pass

        def get_global_graph_pool(self) -> object:
            return object()

    assert platforms._current_platform is None, "vLLM has chosen its platform already"
    platforms._current_platform = FakedCuda()
    from vllm import _custom_ops
    from vllm.vllm_flash_attn import flash_attn_interface

    for name in QUANTISED:  # asked while they are imported; weights here are not quantised
        setattr(_custom_ops, name, lambda *args: False)

    flash_attn_interface.FA4_AVAILABLE = True  # a folder of vLLM's CUDA wheels
    return FakedCuda


def lines_on_cuda(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module that calls `fake_cuda` prints in a process of its own: JSON, line by line."""
    command = [sys.executable, "-m", module, *arguments]
    surroundings = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    environment = {**surroundings, **importing_support(), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _stand_in(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    sys.modules[name] = module
    return module
