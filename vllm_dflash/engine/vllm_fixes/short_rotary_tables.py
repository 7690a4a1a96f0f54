"""YaRN tables have a row for every position of the target.

Wrong in vLLM 0.32.0: `get_rope` makes a YaRN table with only the checkpoint's extended length,
whatever `max_position` says, and its kernels read past the end. Context is stored for all of a
target's positions, even if they are not drafted for. Not reported yet
(docs/engineering/upstream.md). Delete this file when `get_rope` honours `max_position` for YaRN, or
its kernels check bounds.
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
