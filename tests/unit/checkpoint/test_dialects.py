"""Keys of `dflash_config` that are not read, and one that is read before all others."""

from __future__ import annotations

import pytest

from support.pairs import drafter_config
from vllm_dflash.checkpoint.read import parse_config, parse_overridden
from vllm_dflash.checkpoint.spec import DrafterError


@pytest.mark.parametrize(
    ("key", "near"), [("mask_token", "mask_token_id"), ("block_sizes", "block_size"), ("zzz", None)]
)
def test_an_unread_key_is_remarked_on(key: str, near: str | None) -> None:
    spec = parse_config("it", drafter_config(dflash_config={key: 3}))
    (remark,) = spec.remarks
    assert f"dflash_config has {key!r}" in remark
    assert remark.endswith(f"did its author mean {near!r}?" if near else "which is ignored")
    assert spec.model_copy(update={"remarks": ()}) == parse_config("it", drafter_config())
    with pytest.raises(DrafterError, match="changes nothing"):
        parse_overridden("it", drafter_config(), {"dflash_config": {key: 3}})


def test_keys_of_known_drafters_are_not_remarked_on() -> None:
    nested = {
        "use_swa": True,
        "swa_window_size": 9,
        "causal": False,
        "use_aux_hidden_state": True,
        "attention_sink_bias": False,
        "attention_value_scale": 0.5,
        "sample_from_anchor": False,
        "block_size": 8,
        "num_target_layers": 4,
    }
    assert parse_config("it", drafter_config(dflash_config=nested)).remarks == ()


def test_use_aux_hidden_state_is_refused_before_missing_taps() -> None:
    nested = {"target_layer_ids": None, "use_aux_hidden_state": False}
    with pytest.raises(DrafterError, match=r"^drafter 'it': use_aux_hidden_state is false, so"):
        parse_config("it", drafter_config(dflash_config=nested))
