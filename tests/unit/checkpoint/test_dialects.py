"""Keys of `dflash_config` that are not read, and one that is read before all others."""

from __future__ import annotations

import pytest

from support.pairs import as_speculators, drafter_config
from vllm_dflash.checkpoint.read import config_field, parse_config, parse_overridden
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


def test_a_field_is_found_where_its_dialect_keeps_it() -> None:
    """A speculators config may have the block size inside its layers' config."""
    config = as_speculators(drafter_config())
    assert config_field(config, "block_size") == 8
    config["transformer_layer_config"]["block_size"] = config.pop("block_size")
    assert config_field(config, "block_size") == parse_config("it", config).block_size == 8
    assert config_field({**config, "speculators_model_type": "other"}, "block_size") is None
    nested = drafter_config(dflash_config={"block_size": 4}, block_size=None)
    assert config_field(nested, "block_size") == 4
    assert config_field(nested, "block_size", {"dflash_config": {"use_swa": True}}) == 4
    del config["transformer_layer_config"]["block_size"]
    assert config_field(config, "block_size", {"dflash_config": {"block_size": 6}}) == 6
    assert config_field(drafter_config(), "use_aux_hidden_state") is None


def test_use_aux_hidden_state_is_refused_before_missing_taps() -> None:
    nested = {"target_layer_ids": None, "use_aux_hidden_state": False}
    with pytest.raises(DrafterError, match=r"^drafter 'it': use_aux_hidden_state is false, so"):
        parse_config("it", drafter_config(dflash_config=nested))
