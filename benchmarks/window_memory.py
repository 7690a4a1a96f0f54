"""Count the tokens that fit a KV cache beside a drafter with and without windows, as vLLM counts.

    scripts/run.sh python benchmarks/window_memory.py

Only shapes are needed: no weights, no GPU. Groups are vLLM's: each has a block table of its own for
every request, and is as large as the largest one, so layers of many kinds leave gaps.
"""

from __future__ import annotations

import argparse

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from demo_models import DEMO
from vllm_dflash.tools.console import print_report
from vllm_dflash.tools.tables import Table

WINDOW, LENGTH, GIB = 2048, 131072, 36
BLOCK, HYBRID_BLOCK = 16, 784
"""Tokens of a block; a hybrid target's are as large as a state."""


def layer(heads: int, size: int, window: int = 0, block: int = BLOCK) -> AttentionSpec:
    """Return the cache of an attention layer; `window` 0: whole context."""
    shape = {"block_size": block, "num_kv_heads": heads, "head_size": size}
    if window:
        return SlidingWindowSpec(**shape, dtype=torch.bfloat16, sliding_window=window)
    return FullAttentionSpec(**shape, dtype=torch.bfloat16)


def hybrid(heads: int, size: int, layers: int) -> list[KVCacheSpec]:
    """Return the caches of a target in which three of four layers have a state."""
    full = layer(heads, size, block=HYBRID_BLOCK)
    page = full.page_size_bytes
    state = MambaSpec(
        shapes=((page // 2,),), dtypes=(torch.bfloat16,), block_size=LENGTH, page_size_padded=page
    )
    return [state, state, state, full] * (layers // 4)


TARGETS: dict[str, tuple[list[KVCacheSpec], tuple[int, int, int]]] = {
    "Qwen3-8B": ([layer(8, 128)] * 36, (5, 8, 128)),
    "Qwen3-Coder-30B-A3B": ([layer(4, 128)] * 48, (8, 4, 128)),
    "Qwen3.6-27B": (hybrid(4, 256, 64), (5, 8, 128)),
    "gemma-4-31B": ([layer(16, 256, 1024)] * 50 + [layer(4, 512)] * 10, (5, 8, 128)),
    "gpt-oss-20b": ([layer(8, 64, 128), layer(8, 64)] * 12, (8, 8, 64)),
}
"""Caches of all layers of a target, and the shape of its published drafter: layers, heads of keys,
and their size."""


def drafter(shape: tuple[int, int, int], windows: int, block: int) -> list[AttentionSpec]:
    """Return the caches of a drafter whose first `windows` layers have a window."""
    layers, heads, size = shape
    kinds = [WINDOW] * windows + [0] * (layers - windows)
    return [layer(heads, size, window, block) for window in kinds]


def tokens_that_fit(config: VllmConfig, caches: list[KVCacheSpec]) -> tuple[int, int]:
    """Return the tokens of requests of `LENGTH` tokens that fit, and the number of groups."""
    named = {str(number): cache for number, cache in enumerate(caches)}
    groups = get_kv_cache_groups(config, named)
    made = get_kv_cache_config_from_groups(config, groups, GIB << 30)
    return int(get_max_concurrency_for_kv_cache_config(config, made) * LENGTH), len(groups)


def main() -> None:
    """Count and print a table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    # Its own shape is not used.
    config = EngineArgs(model=str(DEMO / "target"), dtype="bfloat16").create_engine_config()
    config.model_config.max_model_len = LENGTH
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.scheduler_config.max_num_batched_tokens = 8192
    config.cache_config.kv_cache_layout = "BLNHC"
    rows = []
    for name, (target, shape) in TARGETS.items():
        block = max(one.block_size for one in target if isinstance(one, AttentionSpec))
        layers, whole = shape[0], 0
        row = [name, str(layers)]
        for windows in (0, layers, layers - 1):
            caches = [*target, *drafter(shape, windows, block)]
            tokens, groups = tokens_that_fit(config, caches)
            whole = whole or tokens
            more = f" ({tokens / whole - 1:+.0%})" if windows else ""
            row.append(f"{tokens:,}{more}, {groups}")
        rows.append(row)
    columns = ["target", "drafter layers", "no window", f"{WINDOW:,} in all", "in all but one"]
    title = f"Tokens that fit {GIB} GiB in requests of {LENGTH:,}, and groups of layers"
    print_report([Table(title, columns, rows)])


if __name__ == "__main__":
    main()
