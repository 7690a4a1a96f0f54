"""Compiles the kernel for draft trees for GPUs, where there is none: python -m
support.compile_child. Writes a line for each that came out."""

from __future__ import annotations

from typing import Any

from support.interpreter import pretend_a_device

GPUS = (80, 90)
CASES: list[dict[str, Any]] = [
    {"dtype": "bf16", "HEAD_SIZE": 128, "GROUP": 4},
    {"dtype": "fp16", "HEAD_SIZE": 64, "GROUP": 8, "WINDOW": 1024, "HAS_SOFTCAP": True},
    {"dtype": "bf16", "HEAD_SIZE": 80, "GROUP": 1, "HAS_SINKS": True, "EVERYBODY": True},
]
TYPES = {
    **dict.fromkeys(("block_table", "query_start_loc", "seq_lens", "depths", "branches"), "*i32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
    "ancestors": "*i64",
    "sinks": "*fp32",
}


def main() -> None:
    pretend_a_device()
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from vllm_dflash.engine.v2 import tree_kernel

    del backends["cpu"]  # it compiles nothing
    kernel: Any = tree_kernel._attend
    for case in CASES:
        rest = dict(case)
        data = dict.fromkeys(("query", "keys", "values", "output"), f"*{rest.pop('dtype')}")
        fixed = {
            "WINDOW": 0,
            **dict.fromkeys(("HAS_SOFTCAP", "HAS_SINKS", "EVERYBODY"), False),
            "PADDED_HEAD": triton.next_power_of_2(rest["HEAD_SIZE"]),
            "BLOCK_SIZE": 16,
            "TILE_ROWS": tree_kernel.TILE_ROWS,
            "TILE_KEYS": tree_kernel.TILE_KEYS,
            **rest,
        }
        types = {**TYPES, **data}
        signature = {
            name: "constexpr" if name in fixed else types.get(name, "i32")
            for name in kernel.arg_names
        }
        constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
        for gpu in GPUS:
            source = ASTSource(kernel, signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", gpu, 32))
            print(f"sm_{gpu} {case['dtype']} {len(made.asm['cubin']) > 0}")


if __name__ == "__main__":
    main()
