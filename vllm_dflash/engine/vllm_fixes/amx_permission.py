"""A CPU engine in bfloat16 does not die of its first attention on machines with AMX.

Wrong in vLLM 0.32.0, CPU: Linux lets a process use AMX once it has asked, and nobody asks before
`cpu_attention_with_kv_cache` uses it: SIGILL, without a word in the log. A large bfloat16 product
asks by chance, so it takes small batches before any large one: an eager engine with a short prompt,
plain decoding included, or with DFlash the dummy batches of the start. Not reported yet
(docs/engineering/upstream.md). Delete this file when vLLM's CPU worker or its attention asks.
"""

from __future__ import annotations

import torch


def ask_for_amx() -> None:
    """In a CPU worker: for this process; does nothing on machines without it."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
