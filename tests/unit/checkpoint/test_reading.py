"""Where a config comes from, what overrides its fields, and what is remarked on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from support.configs_by_hand import QWEN, QWEN_SPEC, SPECULATORS, Fields
from support.pairs import as_speculators, dflash2_config, drafter_config
from vllm_dflash.checkpoint.read import (
    config_field,
    load_config,
    parse_config,
    parse_overridden,
    read_drafter,
)
from vllm_dflash.checkpoint.spec import DrafterError

REPOSITORY = "z-lab/Qwen3-8B-DFlash-b16"


def test_a_folder_and_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def get_config_dict(model: str, *, revision: str | None = None) -> tuple[Any, Any]:
        asked.append((model, revision))
        return QWEN, {}

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)
    (tmp_path / "config.json").write_text("{}")
    assert load_config(str(tmp_path)) == QWEN
    assert read_drafter(REPOSITORY, "main").model_dump() == {**QWEN_SPEC, "model": REPOSITORY}
    assert read_drafter(REPOSITORY, overrides={"logit_scale": 2.0}).logit_scale == 2.0
    assert asked == [(str(tmp_path), None), (REPOSITORY, "main"), (REPOSITORY, None)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((text, "") for text in ("[" * 100_000, "", "{", "9" * 5000)),
        *((text, "it is not an object.$") for text in ("null", "3", '"text"', "[]", "[1]")),
    ],
)
def test_a_config_that_is_no_object(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "config.json").write_text(content)
    start = f"^drafter '{tmp_path}': config.json cannot be read: "
    with pytest.raises(DrafterError, match=start + why):
        load_config(str(tmp_path))


@pytest.mark.parametrize("found", [[1], None])
def test_a_hub_that_gives_no_object(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda *_, **__: (found, {}))
    with pytest.raises(DrafterError, match=r"config\.json cannot be read: it is not an object\.$"):
        load_config(REPOSITORY)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    for make in (lambda: None, (tmp_path / "config.json").mkdir):
        make()
        with pytest.raises(DrafterError, match=rf"^drafter '{tmp_path}': this folder has no confi"):
            load_config(str(tmp_path))
    with pytest.raises(DrafterError, match=r"'\./none': this folder does not exist"):
        load_config("./none")


DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}


@pytest.mark.parametrize(
    ("config", "overrides", "means"),
    [
        ({}, {}, {}),
        ({}, {"block_size": 8, "is_causal": True}, {"block_size": 8, "causal": (True,) * 5}),
        ({}, {"dflash_config": {"mask_token_id": 7}}, {"mask_token_id": 7}),
        ({}, {"rope_theta": 9.0}, DEFAULT_ROPE),
        # The first is refused without the second.
        (
            {},
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64},
            {"windows": (64,) * 5, "causal": (True,) * 5},
        ),
        # What is no object is replaced.
        ({"dflash_config": None}, {"dflash_config": QWEN["dflash_config"]}, {}),
        ({"dflash_config": 3}, {"dflash_config": QWEN["dflash_config"]}, {}),
    ],
)
def test_what_overrides_mean(config: Fields, overrides: Fields, means: Fields) -> None:
    before = json.dumps([QWEN, overrides])
    spec = parse_overridden("it", {**QWEN, **config}, overrides)
    assert spec.model_dump() == {**QWEN_SPEC, **means}
    assert json.dumps([QWEN, overrides]) == before


@pytest.mark.parametrize(
    ("overrides", "means"),
    [
        ({"rope_theta": 9.0}, DEFAULT_ROPE),
        ({"is_causal": True}, {"causal": (True,) * 3}),
        ({"dflash_config": {"mask_token_id": 7}}, {"mask_token_id": 7}),
        ({"mask_token_id": 7}, {"mask_token_id": 7}),
        ({"aux_hidden_state_layer_ids": [3]}, {"taps": (2,)}),
    ],
)
def test_names_of_either_format_override_a_speculators_config(
    overrides: Fields, means: Fields
) -> None:
    """Messages advise z-lab's names, such as "rope_theta" where a config states none."""
    layers = dict(SPECULATORS["transformer_layer_config"])
    del layers["rope_parameters"]
    config = {**SPECULATORS, "transformer_layer_config": layers}
    spec = parse_overridden("it", config, overrides).model_dump()
    assert {name: spec[name] for name in means} == means


@pytest.mark.parametrize(
    ("config", "overrides", "unread"),
    [
        (QWEN, {"block_sizes": 16}, "nothing reads 'block_sizes', did you mean 'block_size'?"),
        (QWEN, {"zzz": 1, "block_size": 8}, "nothing reads 'zzz'"),
        (
            QWEN,
            {"dflash_config": {"mask_tokens": 3, "zzz": 3}},
            "nothing reads 'dflash_config.mask_tokens', did you mean 'dflash_config.mask_token_id'?"
            "; nothing reads 'dflash_config.zzz'",
        ),
        # Read elsewhere, or of another kind of drafter.
        (
            QWEN,
            {"use_swa": True, "dflash_config": {"rope_theta": 9.0}},
            "nothing reads 'use_swa', did you mean 'dflash_config.use_swa'?; nothing reads"
            " 'dflash_config.rope_theta', did you mean 'rope_theta'?",
        ),
        (QWEN, {"aux_hidden_state_layer_ids": [3]}, "nothing reads 'aux_hidden_state_layer_ids'"),
        (QWEN, {"dflash_config": {"selector_top_k": 4}}, "'dflash_config.selector_top_k'"),
        (SPECULATORS, {"causal": True}, "did you mean 'dflash_config.causal'?"),
    ],
)
def test_an_override_that_nothing_reads(config: Fields, overrides: Fields, unread: str) -> None:
    with pytest.raises(DrafterError) as refused:
        parse_overridden("it", config, overrides)
    assert str(refused.value).startswith("drafter 'it': drafter_overrides: nothing reads ")
    assert unread in str(refused.value)
    assert str(refused.value).endswith(". Correct or remove it.")


@pytest.mark.parametrize(
    ("config", "overrides", "means"),
    [
        (QWEN, {"block_size": QWEN["block_size"]}, {}),
        (QWEN, {"sliding_window": 9}, {}),  # no layer slides
        # Each of them alone would do.
        (QWEN, {"is_causal": True, "dflash_config": {"causal": True}}, {"causal": (True,) * 5}),
        (drafter_config(**dflash2_config()), {"dflash_config": {"selector_top_k": 4}}, None),
        (as_speculators(drafter_config(**dflash2_config())), {"selector_top_k": 4}, None),
        (QWEN, {"max_position_embeddings": QWEN["max_position_embeddings"]}, {}),
    ],
)
def test_an_override_that_need_not_be_there(
    config: Fields, overrides: Fields, means: Fields | None
) -> None:
    spec = parse_overridden("it", config, overrides)
    if means is None:
        assert spec.num_candidates == 4
    else:
        assert spec.model_dump() == {**QWEN_SPEC, **means}


def test_an_override_of_the_length_is_refused_unless_it_changes_the_rotation() -> None:
    """vLLM reads it from the file, so it would not change how long requests are drafted."""
    override = {"max_position_embeddings": 4096}
    for config in (QWEN, {key: value for key, value in QWEN.items() if key not in override}):
        for written in (override, {"dflash_config": override}):
            with pytest.raises(DrafterError, match='"max_model_len" of the speculative config'):
                parse_overridden("it", config, written)
    scaled = {**QWEN, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}
    assert parse_overridden("it", scaled, override).max_position_embeddings == 4096


def test_an_override_that_cannot_be_read() -> None:
    with pytest.raises(DrafterError, match=r"^drafter 'it': block_size must be an integer"):
        parse_overridden("it", QWEN, {"block_size": 1})


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_other_layer_types_of_transformers_are_full_attention(kind: str) -> None:
    """As in vLLM's own DFlash, with a remark."""
    kinds = ["full_attention", kind, "sliding_attention", kind, kind]
    spec = parse_config("it", {**QWEN, "layer_types": kinds, "sliding_window": 64})
    assert spec.windows == (None, None, 64, None, None)
    assert spec.causal == (False, False, True, False, False)
    (remark,) = [one for one in spec.remarks if "layer_types" in one]
    assert remark.startswith(f"layer_types has {kind!r}: such layers get full attention")


@pytest.mark.parametrize(
    ("key", "near"), [("mask_token", "mask_token_id"), ("block_sizes", "block_size"), ("zzz", None)]
)
def test_an_unread_key_is_remarked_on(key: str, near: str | None) -> None:
    spec = parse_config("it", drafter_config(dflash_config={key: 3}))
    (remark,) = spec.remarks
    assert f"dflash_config has {key!r}" in remark
    assert remark.endswith(f"did its author mean {near!r}?" if near else "which is ignored")
    assert spec.model_copy(update={"remarks": ()}) == parse_config("it", drafter_config())


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
    assert config_field(nested, "block_size", {"dflash_config": {"use_swa": True}}) == 4
    del config["transformer_layer_config"]["block_size"]
    assert config_field(config, "block_size", {"dflash_config": {"block_size": 6}}) == 6
    assert config_field(drafter_config(), "use_aux_hidden_state") is None
