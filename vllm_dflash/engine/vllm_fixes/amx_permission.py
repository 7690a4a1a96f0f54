"""A bfloat16 CPU engine does not crash in its first attention on machines with AMX.

Wrong in vLLM 0.32.0, CPU: Linux lets a process use AMX only after it has asked for permission, and
vLLM does not ask before `cpu_attention_with_kv_cache` uses it: SIGILL, without a log message. A
large bfloat16 product happens to ask, so only small batches before any large one crash: an eager
engine with a short prompt, plain decoding included, or with DFlash the dummy batches at start-up.
Not reported yet (docs/engineering/upstream.md). Delete this file when vLLM's CPU worker or its
attention asks.
"""

from __future__ import annotations

import torch


def ask_for_amx() -> None:
    """Ask for permission in this process, a CPU worker; does nothing on machines without AMX."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
