"""Arithmetic of the kernels that draw tokens, compiled for GPUs: python -m support.draw_child 90

Print a line of JSON for each: floating-point instructions of a thread for each 1,024 tokens of a
program, pairs counted twice. Some of those called `fused` move numbers.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

from emulated.interpreter import pretend_a_device
from support.compile_child import compiled, examined

BLOCK = 1024
POINTERS = {"row_slots": "*i64", "rows": "*i64", "positions": "*i64", "tokens": "*i32"}
OURS = {**POINTERS, "temperatures": "*fp32", "seeds": "*i64"}
VLLMS = {
    f"{name}_ptr": kind
    for name, kind in {
        "local_argmax": "*i64",
        "expanded_idx_mapping": "*i64",
        "seeds": "*i64",
        "pos": "*i64",
        "temp": "*fp32",
    }.items()
}
CACHE = ("logits_cache_ptr", "logits_cache_col_ptr", "logits_cache_source_ptr")
OF_VLLM = {
    **dict.fromkeys(CACHE),
    "BLOCK_SIZE": BLOCK,
    **dict.fromkeys(("IS_DRAFTING", "APPLY_TEMPERATURE", "PER_TOKEN_COL"), False),
}
KINDS = {"FFMA": "fused", "FMUL": "products", "FADD": "sums", "MUFU": "special"}
KINDS |= {"DFMA": "fused", "DMUL": "products", "DADD": "sums"}


def arithmetic(cubin: bytes) -> Counter[str]:
    """Count the floating-point instructions of machine code."""
    told = examined(cubin, "nvdisasm", "-c")
    found: Counter[str] = Counter()
    for name, pair in re.findall(rf"\b({'|'.join(KINDS)})(2?)\b", told):
        found[KINDS[name]] += 2 if pair else 1
    return found


def main() -> None:
    pretend_a_device()
    from vllm.v1.worker.gpu.sample.gumbel import _gumbel_sample_kernel

    from vllm_dflash.engine.v2.drawing_kernels import TILE, _draw

    def count(kernel: Any, types: dict[str, str], fixed: dict[str, Any], gpu: int) -> Counter[str]:
        return arithmetic(compiled(kernel, types, fixed, gpu).asm["cubin"])

    for gpu in map(int, sys.argv[1:]):
        for dtype in ("*bf16", "*fp32"):
            for fp64 in (False, True):
                value = "*fp64" if fp64 else "*fp32"
                types = {**OURS, "logits": dtype, "values": value}
                drawn = {"V": 151936, "TILE": TILE, "USE_FP64": fp64}
                ours = count(_draw, types, drawn, gpu)
                all_rows = count(_draw, types, {**drawn, "rows": None}, gpu)
                types = {**VLLMS, "logits_ptr": dtype, "local_max_ptr": value}
                of_vllm = count(_gumbel_sample_kernel, types, {**OF_VLLM, "USE_FP64": fp64}, gpu)
                kernels = {"vllm": (of_vllm, 1), "ours": (ours, TILE // BLOCK)}
                kernels["all rows"] = all_rows, TILE // BLOCK
                for name, (found, times) in kernels.items():
                    each = {kind: number / times for kind, number in sorted(found.items())}
                    told = {"gpu": gpu, "logits": dtype, "fp64": fp64, "kernel": name}
                    print(json.dumps({**told, "counts": each}), flush=True)


if __name__ == "__main__":
    main()
