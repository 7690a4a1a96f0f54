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
from typing import Any

from emulated.vllm_platform import pretend_cuda, stand_in
from support import importing_support
from support.interpreter import use_triton

IMPORTED = {
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
    "flashinfer.utils": (
        "FP4Tensor",
        "get_device_sm_count",
        "get_trtllm_gen_multi_ctas_kv_counter_bytes",
    ),
}
"""What vLLM imports from where."""


def fake_cuda() -> type[Any]:
    """From here on vLLM's platform is CUDA. Call before anything imports vLLM.

    Returns the platform, whose `capability` is yet to be set: nothing that is imported before may
    ask for it, so that a process can be forked for each capability.
    """
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # the choice is vLLM's
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"  # kernels are at hand: no download is tried
    use_triton()
    for name, contents in IMPORTED.items():
        stand_in(name, contents)
    platform = pretend_cuda()
    platform.is_pin_memory_available = classmethod(lambda cls: False)
    platform.get_global_graph_pool = lambda self: object()
    return platform


def lines_on_cuda(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module that calls `fake_cuda` prints in a process of its own: JSON, line by line."""
    command = [sys.executable, "-m", module, *arguments]
    surroundings = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    environment = {**surroundings, **importing_support(), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
