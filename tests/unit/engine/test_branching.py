"""Which engines may have draft trees, and of how many tokens."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dflash.engine.v1.branching import granted, why_chains


def config(**changes: Any) -> Any:
    facts = {
        "parallel_config": SimpleNamespace(world_size=1),
        "speculative_config": SimpleNamespace(rejection_sample_method="standard"),
        "model_config": SimpleNamespace(uses_mrope=False, logits_processors=None),
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=False)),
        "aux_output_config": SimpleNamespace(enable_return_routed_experts=False),
        "kv_transfer_config": None,
    }
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        if owner:
            setattr(facts[owner], name, value)
        else:
            facts[name] = value
    return SimpleNamespace(**facts)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_config__world_size": 2}, "this engine has several"),
        ({"kv_transfer_config": "some"}, "a connector takes K/V"),
        ({"model_config__uses_mrope": True}, "several dimensions"),
        ({"speculative_config__rejection_sample_method": "synthetic"}, "'synthetic'"),
        ({"model_config__logits_processors": ["mine"]}, "logits processors"),
        (
            {"speculative_config__use_local_argmax_reduction": True},
            "use_local_argmax_reduction is on",
        ),
        ({"model_config__return_sampling_mask": True}, "return_sampling_mask is on"),
        (
            {"aux_output_config__enable_return_routed_experts": True},
            "enable_return_routed_experts is on",
        ),
    ],
)
def test_engines_that_get_chains(changes: dict[str, Any], why: str) -> None:
    assert why in why_chains(config(**changes), {}, lambda layer: True)


def test_layers_that_get_chains() -> None:
    layers = {"a": True, "b": False}
    assert why_chains(config(), layers, lambda layer: True) == ""
    assert "attention of 'b'" in why_chains(config(), layers, lambda layer: layer)


def test_who_gets_fewer_tokens_than_asked_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.dflash"):
        assert granted(15, room=32) == 15
        assert not caplog.records
        assert granted(15, room=7) == 7
    assert "draft trees have 7 tokens, not 15" in caplog.text
