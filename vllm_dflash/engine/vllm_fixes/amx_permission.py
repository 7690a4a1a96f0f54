"""A bfloat16 CPU engine dies by SIGILL in its first attention on machines with AMX.

Delete this file when vLLM's CPU worker or its attention asks Linux for permission
(docs/engineering/upstream.md#amx_permissionpy).
"""

from __future__ import annotations

import torch


def ask_for_amx() -> None:
    """Ask for permission in this process, a CPU worker; does nothing on machines without AMX."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
