"""Shared by tests of engines on a GPU. On an emulated one, everything is smaller."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from emulated import torch_cuda
from support.engines import held_out_prompts

IS_EMULATED = torch_cuda.is_installed()
ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and current_platform.is_cuda()),
        reason="needs a GPU and vLLM's CUDA build",
    ),
]
SLOW_EMULATED = [pytest.mark.slow] if IS_EMULATED else []
"""For tests that take seconds on a GPU."""
HAS_FLASHINFER = find_spec("flashinfer") is not None
NO_FLASHINFER = pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed")
NO_FLASH_ATTENTION = pytest.mark.skipif(IS_EMULATED, reason="FlashAttention is compiled code")
if not HAS_FLASHINFER:  # vLLM's sampler would fail without it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# Set before Triton compiles a kernel: otherwise float32 products keep 10 bits, and near-ties fall
# differently in batches of other sizes.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

SHARED: dict[str, Any] = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 30}
"""An engine that is slow to exit does not keep the next one from starting, and no engine captures
its graphs twice to measure their memory."""
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    **SHARED,
}
NEW_TOKENS = 64
DTYPE = "bfloat16"
BATCHES: tuple[int, ...] = (1, 3, 8, 24)
PROMPTS = held_out_prompts(24)
if IS_EMULATED:
    SHARED |= {"kv_cache_memory_bytes": 32 << 20}
    GRAPHS |= {
        **SHARED,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        # Inductor would write kernels for a GPU.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        },
    }
    NEW_TOKENS = 12
    BATCHES = (1, 3)
    DTYPE = "float32"  # vLLM picks FlashAttention for others
    PROMPTS = [text[:40] for text in PROMPTS[:3]]
