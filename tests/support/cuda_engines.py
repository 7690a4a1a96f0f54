"""What tests of engines on a GPU share."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from support.engines import held_out_prompts

ON_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and current_platform.is_cuda()),
        reason="needs a GPU and vLLM's CUDA build",
    ),
]
HAS_FLASHINFER = find_spec("flashinfer") is not None
NO_FLASHINFER = pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed")
if not HAS_FLASHINFER:  # vLLM's sampler would stop where it looks for it
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# Before Triton is asked for a kernel: else float32 products keep 10 bits, and near-ties fall
# otherwise in batches of other sizes.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

PROMPTS = held_out_prompts(24)
NEW_TOKENS = 64
SHARED: dict[str, Any] = {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 1 << 30}
"""An engine that was slow to leave does not keep the next one from starting; and none captures its
graphs twice to see what memory they take."""
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    **SHARED,
}
