"""Which drafters tensor parallelism splits, and which every rank has whole."""

import pytest

from support.pairs import drafter_config
from vllm_dflash.checkpoint.ranks import describe_ranks, drafter_ranks, undivided
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError


def test_which_drafters_are_split() -> None:
    spec = parse_config("it", drafter_config())  # 4 heads, 2 for keys and values, 96 rows
    assert [drafter_ranks(spec, size) for size in (1, 2, 3, 4, 8)] == [1, 2, 1, 4, 1]
    assert undivided(spec, 3) == ["4 attention heads", "2 key/value heads"]
    odd = parse_config("it", drafter_config(intermediate_size=95))
    assert describe_ranks(spec, 2, 2) == "the drafter is split over 2 ranks, like the target"
    assert describe_ranks(odd, 2, 1) == (
        "every one of 2 ranks has the whole drafter (95 rows of its MLP (intermediate_size) do not"
        " divide by 2)"
    )
    assert "(as configured)" in describe_ranks(spec, 2, 1)
    assert drafter_ranks(spec, 2, asked=1) == 1
    with pytest.raises(DrafterError, match=r"is 4, the target's tensor_parallel_size 2: .* 2 or 1"):
        drafter_ranks(spec, 2, asked=4)
    with pytest.raises(DrafterError, match=r"95 rows of its MLP .* Leave it out"):
        drafter_ranks(odd, 2, asked=2)
