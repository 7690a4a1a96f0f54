"""Configs of DFlash 2 drafters: what is read from them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.pairs import as_speculators, dflash2_config, drafter_config
from vllm_dflash.checkpoint.architectures import is_drafter
from vllm_dflash.checkpoint.headers import Tensor
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DFlash2, DrafterError, DrafterSpec
from vllm_dflash.checkpoint.tensors import expected_tensors, tensor_faults

LEAST = DFlash2(conv_kernel_size=3, conv_group_size=8, selector_rank=6, selector_top_k=5)


def config(**nested: Any) -> dict[str, Any]:
    return drafter_config(**dflash2_config(dflash_config=nested))


def test_what_is_read() -> None:
    assert parse_config("it", config()).dflash2 == LEAST
    scales = {"input_embedding_scale": 12, "output_multiplier": 0.5, "final_logit_softcapping": 30}
    spec = parse_config("it", config(**scales))
    assert spec.dflash2 == LEAST.model_copy(update=scales)
    assert DrafterSpec.model_validate_json(spec.model_dump_json()) == spec
    assert parse_config("it", config(final_logit_softcapping=0.0)).dflash2 == LEAST


def test_both_dialects_say_the_same() -> None:
    of_zlab, of_speculators = config(), as_speculators(config())
    assert of_speculators["speculators_model_type"] == "dflash2"
    one, other = parse_config("it", of_zlab), parse_config("it", of_speculators)
    assert one.model_dump() | {"dialect": ""} == other.model_dump() | {"dialect": ""}
    assert is_drafter(of_zlab)
    assert is_drafter(of_speculators)


def test_the_first_dflash_has_nothing_of_it() -> None:
    """DFlash 2 fields in its `dflash_config` are ignored, with a remark."""
    fields = drafter_config(dflash_config={"conv_kernel_size": 3}, selector_top_k=4)
    spec = parse_config("it", fields)
    assert spec.dflash2 is None
    assert any("conv_kernel_size" in remark for remark in spec.remarks)
    assert parse_config("it", as_speculators(drafter_config())).remarks == ()


def test_fields_at_top_level_are_the_layers_own() -> None:
    """As in vLLM: a Gemma drafter's config may have the softcap of its target there."""
    fields = drafter_config(**dflash2_config(final_logit_softcapping=30.0))
    assert parse_config("it", fields).dflash2 == LEAST


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_kernel_size": None}, "conv_kernel_size of dflash_config must be an integer from 1"),
        ({"conv_kernel_size": 0}, "conv_kernel_size of dflash_config must be an integer from 1"),
        ({"selector_rank": "six"}, "selector_rank of dflash_config must be an integer"),
        ({"selector_top_k": None}, "selector_top_k of dflash_config must be an integer"),
        ({"selector_top_k": 321}, r"selector_top_k \(321\) must not exceed vocab_size \(320\)"),
        ({"conv_group_size": 7}, r"conv_group_size \(7\) must divide hidden_size \(64\)"),
        ({"output_multiplier": 0}, "output_multiplier of dflash_config must be a positive number"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping of dflash_config must be"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        parse_config("it", config(**changes))


def test_a_smaller_vocabulary_is_refused() -> None:
    with pytest.raises(DrafterError, match="draft_vocab_size is 100 and vocab_size 320"):
        parse_config("it", config() | {"draft_vocab_size": 100})


def test_its_tensors() -> None:
    """Names are those in the checkpoints; shapes are written by hand."""
    spec = parse_config("it", config())
    tensors = expected_tensors(spec)
    own = {name: shape for name, shape in tensors.items() if "conv" in name or "selector" in name}
    convolutions = [f"layers.{i}.{part}_conv" for i in (0, 1) for part in ("attention", "mlp")]
    assert own == {
        "candidate_selector.predecessor_codebook": (320, 6),
        "candidate_selector.successor_codebook": (320, 6),
        "candidate_selector.hidden_projection.weight": (6, 64),
        **{f"{name}.base_kernel": (2, 3, 64) for name in convolutions},
        **{f"{name}.kernel_projection.weight": (2 * 3 * 8, 64) for name in convolutions},
    }
    found = {name: Tensor(shape, "BF16") for name, shape in tensors.items()}
    assert tensor_faults(spec, found) == []
    del found["candidate_selector.successor_codebook"]
    assert tensor_faults(spec, found) == ["missing candidate_selector.successor_codebook [320, 6]"]
