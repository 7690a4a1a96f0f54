"""A pretended GPU, for all that vLLM looks at while it starts.

It has the driver's answers (compute capability, name, memory) and empty modules in place of
compiled kernels and FlashInfer, so that what imports them can be imported. vLLM decides everything
from there on. Nothing can be run.
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
"""Names that vLLM imports, by module."""


def fake_cuda() -> type[Any]:
    """Make CUDA vLLM's platform. Call before anything imports vLLM.

    Returns the platform. Its `capability` is not set yet: nothing that is imported before then may
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
    """Run a module that calls `fake_cuda` in its own process; return its lines of JSON."""
    command = [sys.executable, "-m", module, *arguments]
    surroundings = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    environment = {**surroundings, **importing_support(), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
