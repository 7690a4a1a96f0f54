"""On a GPU, our draw and vLLM's compute the same bits for a token: both are compiled to the same
arithmetic, whatever the logits' dtype and the sizes of their tiles.

A seeded text depends on it: steps without drafts are drawn by either, steps with drafts by ours."""

from __future__ import annotations

from itertools import groupby

from support.compiled_kernels import for_gpus, told_by


@for_gpus
def test_draws_have_the_same_arithmetic(gpus: tuple[str, ...]) -> None:
    made = told_by("draw_child", gpus)
    for (gpu, fp64), kernels in groupby(
        sorted(made, key=lambda one: (one["gpu"], one["fp64"])),
        key=lambda one: (one["gpu"], one["fp64"]),
    ):
        counts = [one["counts"] for one in kernels]
        assert len(counts) == 6
        assert {one["products"] for one in counts} == {counts[0]["products"]}, (gpu, fp64)
        assert {one["sums"] for one in counts} == {counts[0]["sums"]}, (gpu, fp64)
        assert {one.get("special") for one in counts} == {counts[0].get("special")}, (gpu, fp64)
        # One more for each token would be 8 in a thread.
        fused = [one["fused"] for one in counts]
        assert 0 <= max(fused) - min(fused) < 1, (gpu, fp64, fused)
