"""The kernel for draft trees against attention written out, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from support.tree_rows import Case, attend
from vllm_dflash.engine.v2.tree_kernel import tile_of


@pytest.mark.usefixtures("runner")
@pytest.mark.parametrize("runner", ["v2"], indirect=True)
@pytest.mark.parametrize("everybody", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "case",
    [
        Case([37], [8]),
        Case([0, 50, 16], [5, 1, 12], heads=4, kv_heads=4),
        Case([100, 3], [64, 2], heads=2, kv_heads=1),
        Case([70, 20], [9, 6], window=24),
        Case([40], [20], window=3),
        Case([33, 12], [7, 7], softcap=15.0, head_size=48),
        Case([20, 45], [4, 15], sinks=True, head_size=16),
        Case([30, 31, 32], [6, 0, 3], heads=8, kv_heads=2, window=17, sinks=True),
        Case([30, 0], [5, 64], kv_heads=4, head_size=256, window=9),  # tiles of 16
    ],
    ids=lambda case: f"{case.contexts}-{case.trees}",
)
def test_rows_see_the_context_and_their_ancestors(case: Case, seed: int, everybody: bool) -> None:
    output, expected = attend(case, seed, everybody=everybody)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_size", "dtype", "tile"),
    [
        (64, torch.bfloat16, 32),
        (256, torch.bfloat16, 32),
        (512, torch.float16, 16),
        (128, torch.float32, 32),
        (192, torch.float32, 16),  # padded to 256
        (512, torch.float32, 16),
    ],
)
def test_tiles(head_size: int, dtype: torch.dtype, tile: int) -> None:
    assert tile_of(head_size, dtype) == tile
