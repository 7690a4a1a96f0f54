"""Configs of DFlash 2, LiLiCorr and AdaFlash drafters: what is read from them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.pairs import as_speculators, dflash2_config, drafter_config, lilicorr_config
from vllm_dflash.checkpoint.architectures import is_drafter
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DFlash2, DrafterError, DrafterSpec, LiLiCorr

DFLASH2 = DFlash2(conv_kernel_size=3, conv_group_size=8, selector_rank=6, selector_top_k=5)
LILICORR = LiLiCorr(
    candidate_topk=4,
    hidden_size=48,
    num_layers=2,
    num_heads=3,
    mlp_ratio=1.5,
    factor_dim=10,
    vector_eps=1e-6,
    logit_scale=10.0,
)
CONVOLUTIONS = {"conv_kernel_size": 3, "conv_group_size": 8}


def dflash2(**nested: Any) -> dict[str, Any]:
    return drafter_config(**dflash2_config(dflash_config=nested))


def lilicorr(**nested: Any) -> dict[str, Any]:
    return drafter_config(**lilicorr_config(dflash_config=nested))


def test_what_is_read_of_dflash2() -> None:
    assert parse_config("it", dflash2()).dflash2 == DFLASH2
    scales = {"input_embedding_scale": 12, "output_multiplier": 0.5, "final_logit_softcapping": 30}
    spec = parse_config("it", dflash2(**scales))
    assert spec.dflash2 == DFLASH2.model_copy(update=scales)
    assert DrafterSpec.model_validate_json(spec.model_dump_json()) == spec
    assert parse_config("it", dflash2(final_logit_softcapping=0.0)).dflash2 == DFLASH2


def test_both_dialects_say_the_same() -> None:
    of_zlab, of_speculators = dflash2(), as_speculators(dflash2())
    assert of_speculators["speculators_model_type"] == "dflash2"
    one, other = parse_config("it", of_zlab), parse_config("it", of_speculators)
    assert one.model_dump() | {"dialect": ""} == other.model_dump() | {"dialect": ""}
    assert is_drafter(of_zlab)
    assert is_drafter(of_speculators)


def test_the_first_dflash_has_nothing_of_dflash2() -> None:
    """DFlash 2 fields in its `dflash_config` are ignored, with a remark."""
    fields = drafter_config(dflash_config={"conv_kernel_size": 3}, selector_top_k=4)
    spec = parse_config("it", fields)
    assert spec.dflash2 is None
    assert any("conv_kernel_size" in remark for remark in spec.remarks)
    assert parse_config("it", as_speculators(drafter_config())).remarks == ()


def test_fields_at_top_level_are_the_layers_own() -> None:
    """As in vLLM: a Gemma drafter's config may have the softcap of its target there."""
    assert parse_config("it", dflash2() | {"final_logit_softcapping": 30.0}).dflash2 == DFLASH2


def test_what_is_read_of_lilicorr() -> None:
    spec = parse_config("it", lilicorr())
    assert (spec.lilicorr, spec.dflash2, spec.convolutions) == (LILICORR, None, None)
    assert (spec.num_candidates, spec.remarks) == (4, ())
    assert is_drafter(lilicorr())
    convolved = parse_config("it", lilicorr(**CONVOLUTIONS))
    assert convolved.convolutions == LILICORR.model_copy(update=CONVOLUTIONS)
    assert DrafterSpec.model_validate_json(convolved.model_dump_json()) == convolved
    assert parse_config("it", lilicorr(conv_kernel_size=0, conv_group_size=0)).convolutions is None


@pytest.mark.parametrize("written", [0, None])
def test_a_head_as_wide_as_the_drafter(written: int | None) -> None:
    spec = parse_config("it", lilicorr(lilicorr_hidden_size=written, lilicorr_num_heads=4))
    assert spec.lilicorr is not None
    assert (spec.lilicorr.hidden_size, spec.lilicorr.mlp_size) == (64, 96)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dflash2(selector_top_k=321), r"selector_top_k \(321\) must not exceed vocab_size \(320\)"),
        (dflash2(conv_group_size=7), r"conv_group_size \(7\) must divide hidden_size \(64\)"),
        (dflash2() | {"draft_vocab_size": 100}, "draft_vocab_size is 100 and vocab_size 320"),
        (lilicorr(lilicorr_enabled=False), "lilicorr_enabled is false"),
        (lilicorr(sample_from_anchor=True), "sample_from_anchor is true, so .* LiLiCorr drafters"),
        (lilicorr(lilicorr_candidate_topk=3), "must be a power of two, it is 3"),
        (lilicorr(lilicorr_num_layers=None), "lilicorr_num_layers of dflash_config must be an"),
        (lilicorr(lilicorr_num_heads=5), r"lilicorr_num_heads \(5\) must divide .*size \(48\)"),
        (lilicorr(conv_kernel_size=3), "conv_kernel_size is 3 and conv_group_size 0"),
        (
            lilicorr(conv_kernel_size=3, conv_group_size=7),
            r"conv_group_size \(7\) must divide hidden_size",
        ),
        (lilicorr() | {"draft_vocab_size": 100}, "draft_vocab_size is 100 and .*must be equal"),
        (lilicorr() | {"target_hidden_size": 96}, "target_hidden_size is 96 and .*must be equal"),
    ],
)
def test_what_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        parse_config("it", config)


# Fields of AdaFlash/Qwen3-8B-AdaFlash, beyond those of any drafter.
ADAFLASH = {
    "thresh_head_bottleneck_dim": 256,
    "use_thresh_head_two_model": True,
    "thresh_head_direct_len": True,
}


def test_adaflash_is_a_plain_drafter_whose_length_head_is_not_run() -> None:
    spec = parse_config("it", drafter_config(dflash_config=ADAFLASH))
    assert spec.remarks == (
        "AdaFlash: its length head (thresh_head_two_model) is not run, because vllm-dflash plans"
        " draft lengths itself",
    )
    assert spec.model_dump() == {
        **parse_config("it", drafter_config()).model_dump(),
        "length_heads": ("thresh_head_two_model",),
        "remarks": spec.remarks,
    }
    assert DrafterSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize("value", [False, None, "yes"])
def test_a_length_head_that_is_switched_off(value: object) -> None:
    nested = {"use_thresh_head_two_model": value, "thresh_head_bottleneck_dim": 256}
    spec = parse_config("it", drafter_config(dflash_config=nested))
    plain = parse_config("it", drafter_config())
    assert spec.model_copy(update={"remarks": ()}) == plain
    assert all("which is ignored" in remark for remark in spec.remarks)
