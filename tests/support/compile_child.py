"""Compile our kernels for GPUs without having one: python -m support.compile_child. Print a line
of JSON for each compiled kernel."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from math import log2
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import vllm_dflash
from emulated.interpreter import pretend_a_device

PACKAGE = Path(vllm_dflash.__file__).parent
TYPES = {
    name: kind
    for kind, names in {
        "*i64": "slots newest drafts tokens found_tokens best masks layers chain candidates d2t"
        " argmax_nodes positions drawn sampled seeds counts counts_before batch_slots row_slots",
        "*i32": "block_table query_start_loc seq_lens depths num_sampled num_rejected texts"
        " text_lens matches found_matches window found_table found_lens logit_ends row_ends sizes"
        " paths path_lens rows may_branch parents chains cu_num_logits prefill_lens ends"
        " batch_num_sampled",
        "*bf16": "query cache output",
        "*fp32": "confidence block_confidence chances records overall sums outcomes rates trust"
        " knots sinks parts found_parts log_sums chain_chances probabilities values temperatures",
        "fp32": "scale softcap",
    }.items()
    for name in names.split()
}
"""Types of arguments; the others are numbers."""
KINDS = {"NO_DRAFTS": 0, "BLOCK": 1, "TEXT": 2}
WIDTHS, ONE = {"K": 15, "PADDED_K": 16}, {"K": 1, "PADDED_K": 1}
GRADING = {
    **KINDS,
    "REQUEST_MEMORY": 0.9,
    "NUM_RECORD_FIELDS": 6,
    "COLUMNS": 11,
    "CUTS": 3,
    "ROWS": 256,
}
OVERALL = {"BLOCK": 1, "TEXT": 2, "LOG_MEMORY": log2(0.98), "TILE": 128, "COLUMNS": 11}
MOST_LIKELY: dict[str, Any] = {
    **dict.fromkeys(("row_slots", "positions", "temperatures", "seeds", "d2t")),
    "USE_FP64": False,
}
NOT_DRAWN = {"IS_DRAWN": False}
CHOICE = {**KINDS, **WIDTHS, "NUM_RECORD_FIELDS": 6, "MOST_TRUST": 511, "PRIOR": 8.0}
TILE = "ROWS", "KEYS", "num_stages"
TREE = {
    "KV_HEADS": 8,
    "GROUP": 4,
    "NODES": 64,
    "WINDOW": 0,
    "HAS_SOFTCAP": False,
    "HEAD_SIZE": 128,
    "PADDED_HEAD": 128,
    "BLOCK_SIZE": 16,
    **dict(zip(TILE, (64, 32, 3), strict=True)),
    "PADDED_REQUESTS": 256,
}
FEATURES = {"WINDOW": 128, "HAS_SOFTCAP": True}
LARGEST_HEAD = {
    **TREE,
    **FEATURES,
    "HEAD_SIZE": 512,
    "PADDED_HEAD": 512,
    **dict(zip(TILE, (16, 16, 3), strict=True)),
}
GROWTH = {
    **WIDTHS,
    **dict.fromkeys(("N", "PADDED_N", "PADDED_W"), 64),
    "W": 64,
    "C": 8,
    "PADDED_C": 8,
    "NUM_RECORD_FIELDS": 6,
    "PRIOR": 8.0,
    "BLOCK": 1,
    "HAS_BLOCK": True,
}
FEW_NODES = {"N": 5, "PADDED_N": 8, "W": 15, "PADDED_W": 16, "HAS_BLOCK": False}
NODES, ONE_NODE = {"N": 64, "PADDED_N": 64}, {"N": 1, "PADDED_N": 1}
PATH = {"NODES": 15, "PADDED_NODES": 16, "CHUNK": 128}


CASES: dict[str, list[dict[str, Any]]] = {
    "confidence._find_in_tiles": [
        {**MOST_LIKELY, "logits": "*bf16", "V": 151936, "TILE": 4096},
        {**MOST_LIKELY, "logits": "*fp32", "V": 1000, "TILE": 4096},
        {"logits": "*bf16", "V": 32000, "TILE": 4096, "USE_FP64": False},
        {"logits": "*fp32", "d2t": None, "V": 1000, "TILE": 1024, "USE_FP64": True},
    ],
    "confidence._find_in_rows": [
        {"logits": "*bf16", "V": 151936, "TILE": 4096, "PADDED_TILES": 64, "C": 8, **NOT_DRAWN},
        {"logits": "*fp32", "V": 1000, "TILE": 1024, "PADDED_TILES": 1, "C": 1, **NOT_DRAWN},
        {"logits": "*fp32", "V": 1000, "TILE": 1024, "PADDED_TILES": 1, "C": 1, "IS_DRAWN": True},
    ],
    "draft_noise._noise": [
        {"noise": "*fp32", "C": 8, "USE_FP64": False},
        {"noise": "*fp32", "C": 1, "USE_FP64": True},
    ],
    "text_look_up._scan": [{"SHORTEST": 2, "LONGEST": 32, "TILE": 1024}],
    "text_look_up._predict": [{**WIDTHS, "PADDED_PARTS": 128}, {**ONE, "PADDED_PARTS": 1}],
    "grading._grade": [{**GRADING, **WIDTHS}, {**GRADING, **ONE, "chains": None}],
    "grading._learn_overall": [{**OVERALL, **WIDTHS}, {**OVERALL, **ONE}],
    "drawing_kernels._accept": [
        {"drafts": "*i32", "V": 151936, "PADDED_W": 8},
        {"drafts": "*i32", "seq_lens": None, "V": 151936, "PADDED_W": 128},
    ],
    "tree_growth._grow": [GROWTH, {**GROWTH, **FEW_NODES}],
    "tree_rows._place": [
        *(NODES, ONE_NODE),
        *({**nodes, "prefill_lens": None, "depths": None} for nodes in (NODES, ONE_NODE)),
    ],
    "tree_walk._walk": [{**NODES, "D": 15, "CUTS": 3}, {**ONE_NODE, "D": 1, "CUTS": 3}],
    "tree_context._attend_context": [TREE, LARGEST_HEAD],
    "tree_nodes._attend_nodes": [
        {**TREE, "HAS_SINKS": False},
        {**LARGEST_HEAD, "HAS_SINKS": True},
    ],
    "tree_move._move_cached": [{**PATH, "ALIGNED": 4, "COLUMNS": 9}],
    "tree_move._move_rows": [PATH],
    "choice._choose": [
        {**CHOICE, "HAS_BLOCK": True, "HAS_TEXT": True},
        {**CHOICE, "HAS_BLOCK": True, "HAS_TEXT": False, **ONE},
        {**CHOICE, "HAS_BLOCK": False, "HAS_TEXT": True},
        {**CHOICE, "HAS_BLOCK": False, "HAS_TEXT": False},
    ],
}
"""Values fixed at compile time, and types that differ, by kernel."""


def launched_kernels() -> dict[str, Path]:
    """Return the files of all kernels that are launched, not called by another kernel, by file and
    name."""
    sources = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    everywhere = "\n".join(sources.values())
    return {
        f"{file.stem}.{each.name}": file
        for file, source in sources.items()
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(one) for one in each.decorator_list)
        and re.search(rf"\b{each.name}\[.*\]\(", everywhere)
    }


def examined(cubin: bytes, tool: str, option: str) -> str:
    """Return what a tool of Triton's prints of machine code."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def memory_of(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes that it spills to memory."""
    told = examined(cubin, "cuobjdump", "--dump-resource-usage")
    return {
        name: int(told.partition(f"{word}:")[2].split()[0])
        for name, word in (("registers", "REG"), ("spilled", "STACK"))
    }


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    fixed: Mapping[str, Any],
    gpu: int,
    aligned: Mapping[tuple[int], Any] | None = None,
    **options: Any,
) -> Any:
    """Compile a kernel. `types` of arguments, of which others are numbers; `fixed` ones; where they
    are `aligned`."""
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backends.pop("cpu", None)  # it compiles nothing; vLLM, once imported, does without it
    signature = {
        each: "constexpr" if each in fixed else types.get(each, "i32") for each in kernel.arg_names
    }
    constants = {(kernel.arg_names.index(each),): fixed[each] for each in fixed}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=options)


def main() -> None:
    pretend_a_device()
    from vllm_dflash.engine.v2.trees.tree_kernels import tile_of

    all_kernels: dict[str, Any] = {}
    for name, file in launched_kernels().items():
        place = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        all_kernels[name] = getattr(import_module(place), name.split(".")[1])
    assert all_kernels.keys() == CASES.keys()
    for name, kernel in all_kernels.items():
        for case in CASES[name]:
            if "HEAD_SIZE" in case:
                assert tuple(case[each] for each in TILE) == tile_of(case["HEAD_SIZE"], 2)
            options = {each: case[each] for each in case if each == "num_stages"}
            types = {**TYPES, **{each: case[each] for each in case if each.islower()}}
            fixed = {each: value for each, value in case.items() if each.isupper() or value is None}
            # As in use: PyTorch's memory begins at such addresses, and strides are such numbers.
            aligned = {
                (param.num,): [["tt.divisibility", 16]]
                for param in kernel.params
                if param.name not in fixed
                and types.get(param.name) != "fp32"
                and not param.do_not_specialize
            }
            for gpu in map(int, sys.argv[1:]):
                made = compiled(kernel, types, fixed, gpu, aligned, **options)
                assert made.asm["cubin"]
                found = {"gpu": gpu, "kernel": name, "shared": made.metadata.shared}
                on_the_way = re.findall(r"cp\.async\.wait_group\s+(\w+)", made.asm["ptx"])
                found["on_the_way"] = max((int(one, 0) for one in on_the_way), default=0)
                found |= memory_of(made.asm["cubin"]) if name.startswith("tree_move") else {}
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
