"""YaRN tables are too short for the positions of a target, and kernels read past their end.

Delete this file when `get_rope` honours `max_position` for YaRN, or its kernels check bounds
(docs/engineering/upstream.md#short_rotary_tablespy).
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


def cover_positions(model: nn.Module, num_positions: int) -> None:
    """Extend a draft model's tables to `num_positions` rows by repeating the last row."""
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            table = module.cos_sin_cache  # [positions, rotary dim]
            missing = num_positions - len(table)
            if missing > 0:
                module.cos_sin_cache = torch.cat([table, table[-1:].expand(missing, -1)])
