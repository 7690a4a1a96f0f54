"""Our kernels are held against oracles, in Triton's interpreter; and they compile for GPUs on a
machine without one: Triton brings the compilers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.compile_child import launched_kernels
from support.compiled_kernels import for_gpus, told_of
from support.kernel_oracles import ORACLES
from support.kernel_variants import launched
from vllm_dflash.engine.v2.trees.tree_kernels import tile_of

pytestmark = [
    pytest.mark.v2,
    # Results of rows that are not finite are not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SMALL = {**dict.fromkeys(("K", "PADDED_K", "N", "PADDED_N", "D", "PADDED_PARTS"), 1), "V": 1000}
SMALL |= {"HAS_BLOCK": False}
LARGE = {
    "V": 151936,
    "PADDED_TILES": 64,
    "PADDED_PARTS": 128,
    "PADDED_REQUESTS": 256,
    "ROWS": 256,
    "K": 15,
    "PADDED_K": 16,
    "D": 15,
    "N": 64,
    "PADDED_N": 64,
    "W": 64,
    "PADDED_W": 128,
    "NODES": 15,
    "PADDED_NODES": 16,
}
"""Constants of small and large engines."""
TYPES = {"logits": "*bf16", "chains": "*i32", "query": "*bf16", "cache": "*bf16", "output": "*bf16"}
"""Types in large engines, with trees."""


def attention(head_size: int, **features: Any) -> dict[str, Any]:
    """Constants of kernels for trees of 64 nodes in layers with heads of this size."""
    tile = dict(zip(("ROWS", "KEYS", "num_stages"), tile_of(head_size, 2), strict=True))
    sizes = {"HEAD_SIZE": head_size, "PADDED_HEAD": head_size, "KV_HEADS": 8, "GROUP": 4}
    return {**LARGE, **sizes, **tile, "NODES": 64, **features}


@pytest.fixture(scope="module")
def kernels() -> list[dict[str, Any]]:
    """What oracles launch, in the sizes of engines."""
    with launched() as found:
        for oracle in ORACLES:
            for case, dtype in oracle.cases_on("cpu"):
                oracle.check(case, dtype, "cpu")
    wanted: dict[str, dict[str, Any]] = {}
    for one in found.values():
        sizes: list[tuple[dict[str, Any], dict[str, str]]] = [(SMALL, {}), (LARGE, TYPES)]
        if "HEAD_SIZE" in one["fixed"]:
            features = {"WINDOW": 128, "HAS_SOFTCAP": True, "HAS_SINKS": True}
            sizes = [
                (attention(128), TYPES),
                (attention(512, **features), {**TYPES, "sinks": "*fp32"}),
            ]
        for size, types in sizes:
            made = {
                "kernel": one["kernel"],
                "types": {name: types.get(name, kind) for name, kind in one["types"].items()},
                "fixed": {name: size.get(name, value) for name, value in one["fixed"].items()},
                "options": {"num_stages": size["num_stages"]} if "num_stages" in size else {},
            }
            wanted[json.dumps(made)] = made
    return [*wanted.values()]


def test_each_kernel_is_held_against_something(kernels: list[dict[str, Any]]) -> None:
    assert {one["kernel"] for one in kernels} == {*launched_kernels()}


@for_gpus
def test_all_kernels_compile_for_gpus(kernels: list[dict[str, Any]], gpus: tuple[str, ...]) -> None:
    made = told_of(kernels, gpus)
    assert len(made) == len(gpus) * len(kernels)
    # Memory of a thread block on the GPUs with the least: 99 KiB at capability 8.6 and 8.9.
    assert [one for one in made if one["shared"] > 99 * 1024] == []
    # Kernels that move nodes must leave registers for many programs at a time.
    moving = [one for one in made if "registers" in one]
    assert {one["kernel"] for one in moving} == {"tree_move._move_cached", "tree_move._move_rows"}
    assert max(one["registers"] for one in moving) <= 64
    assert max(one["spilled"] for one in moving) == 0
    # Keys are loaded while others are weighed.
    attending = [one for one in made if "_attend_" in one["kernel"]]
    assert min(one["on_the_way"] for one in attending) > 0
