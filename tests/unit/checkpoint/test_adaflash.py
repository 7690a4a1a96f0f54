"""AdaFlash drafters are read as plain drafters, without their length head."""

from __future__ import annotations

import pytest

from support.pairs import drafter_config
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import check_tensors, expected_tensors

PUBLISHED = {
    "thresh_head_bottleneck_dim": 256,
    "use_thresh_head_two_model": True,
    "thresh_head_direct_len": True,
}
"""Fields of AdaFlash/Qwen3-8B-AdaFlash, beyond those of any drafter."""
HEAD = {
    "thresh_head_two_model.down.weight": (256, 128),
    "thresh_head_two_model.down.bias": (256,),
    "thresh_head_two_model.res.0.weight": (256, 256),
    "thresh_head_two_model.out.weight": (1, 256),
}
PLAIN = parse_config("it", drafter_config())


def floats(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: Tensor(shape, "BF16") for name, shape in shapes.items()}


def test_the_head_is_said_not_to_run_and_nothing_else_changes() -> None:
    spec = parse_config("it", drafter_config(dflash_config=PUBLISHED))
    assert spec.remarks == (
        "AdaFlash: its length head (thresh_head_two_model) is not run, because vllm-dflash plans"
        " draft lengths itself",
    )
    assert spec.model_dump() == {
        **PLAIN.model_dump(),
        "length_heads": ("thresh_head_two_model",),
        "remarks": spec.remarks,
    }
    assert DrafterSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("value", [False, None, "yes"])
def test_a_head_that_is_switched_off(value: object) -> None:
    nested = {"use_thresh_head_two_model": value, "thresh_head_bottleneck_dim": 256}
    spec = parse_config("it", drafter_config(dflash_config=nested))
    assert spec.model_copy(update={"remarks": ()}) == PLAIN
    assert all("which is ignored" in remark for remark in spec.remarks)


def test_its_tensors_are_no_surplus_where_the_config_knows_of_them() -> None:
    tensors = floats({**expected_tensors(PLAIN), **HEAD})
    check_tensors(parse_config("it", drafter_config(dflash_config=PUBLISHED)), tensors)
    with pytest.raises(DrafterError, match=r"surplus thresh_head_two_model\.down\.bias \[256\]"):
        check_tensors(PLAIN, tensors)
    other = parse_config("it", drafter_config(dflash_config={"use_prob_head": True}))
    with pytest.raises(DrafterError, match=r"surplus thresh_head_two_model\.down\.bias"):
        check_tensors(other, tensors)
