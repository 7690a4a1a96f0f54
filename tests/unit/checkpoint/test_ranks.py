"""Which drafters tensor parallelism splits, and which each rank holds whole."""

import pytest

from support.pairs import drafter_config, lilicorr_config
from vllm_dflash.checkpoint.pairing import describe_ranks, drafter_ranks, undivided_parts
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "ranks", "left"),
    [
        (4, 2, 96, 1, []),
        (4, 2, 96, 2, []),
        (4, 2, 96, 4, []),  # two ranks share a key/value head
        (4, 4, 96, 2, []),
        (4, 2, 96, 3, ["4 attention heads", "2 key/value heads"]),
        (4, 1, 95, 4, ["95 rows of its MLP (intermediate_size)"]),
        (6, 3, 96, 2, ["3 key/value heads"]),
        ((6, 2, 90, 4, ["6 attention heads", "90 rows of its MLP (intermediate_size)"])),
    ],
)
def test_what_does_not_divide(
    heads: int, kv_heads: int, rows: int, ranks: int, left: list[str]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    spec = parse_config("it", drafter_config(**sizes, intermediate_size=rows))
    assert undivided_parts(spec, ranks) == left
    assert drafter_ranks(spec, ranks) == (1 if left else ranks)
    assert drafter_ranks(spec, ranks, asked=1) == 1
    if left:
        assert f"({', '.join(left)} do not divide by {ranks})" in describe_ranks(spec, ranks, 1)


def test_the_head_of_lilicorr_is_split_on_all_ranks() -> None:
    """vLLM splits it even if each rank holds the rest of the drafter whole."""
    spec = parse_config("it", drafter_config(**lilicorr_config(), intermediate_size=95))
    assert [drafter_ranks(spec, ranks) for ranks in (1, 2, 4, 8)] == [1] * 4  # 48 and 72 rows
    for ranks in (5, 16):
        with pytest.raises(
            DrafterError, match=f"of 48 and 72 rows, .*tensor_parallel_size {ranks}"
        ):
            drafter_ranks(spec, ranks, asked=1)


def test_how_a_drafter_is_split() -> None:
    spec = parse_config("it", drafter_config())  # 4 heads, 2 for keys and values, 96 rows
    assert drafter_ranks(spec, 8) == 1
    assert drafter_ranks(spec, 4, asked=4) == 4
    odd = parse_config("it", drafter_config(intermediate_size=95))
    assert describe_ranks(spec, 2, 2) == "the drafter is split over 2 ranks, like the target"
    assert describe_ranks(odd, 2, 1) == (
        "each of 2 ranks has the whole drafter (95 rows of its MLP (intermediate_size) do not"
        " divide by 2)"
    )
    assert "(as configured)" in describe_ranks(spec, 2, 1)
    assert drafter_ranks(spec, 2, asked=1) == 1
    with pytest.raises(DrafterError, match=r"is 4, the target's tensor_parallel_size 2: .* 2 or 1"):
        drafter_ranks(spec, 2, asked=4)
    with pytest.raises(DrafterError, match=r"95 rows of its MLP .* Leave it out"):
        drafter_ranks(odd, 2, asked=2)
