"""Our kernels compile for GPUs on a machine without one: Triton brings the compilers."""

from __future__ import annotations

from support.compile_child import CASES
from support.compiled_kernels import for_gpus, told_by


@for_gpus
def test_all_kernels_compile_for_gpus(gpus: tuple[str, ...]) -> None:
    made = told_by("compile_child", gpus)
    assert len(made) == len(gpus) * sum(len(cases) for cases in CASES.values())
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
