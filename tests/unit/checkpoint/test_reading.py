"""Where a config comes from, what overrides its fields, and what is remarked on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from support.configs_by_hand import QWEN, QWEN_SPEC, SPECULATORS, Fields
from vllm_dflash.checkpoint.read import load_config, parse_config, parse_overridden, read_drafter
from vllm_dflash.checkpoint.spec import DrafterError

REPOSITORY = "z-lab/Qwen3-8B-DFlash-b16"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Record requests to a hub that answers each with QWEN."""
    asked: list[tuple[str, str | None]] = []

    def get_config_dict(model: str, *, revision: str | None = None) -> tuple[Any, Any]:
        asked.append((model, revision))
        return QWEN, {}

    monkeypatch.setattr(PretrainedConfig, "get_config_dict", get_config_dict)
    return asked


def test_a_folder_and_a_repository(tmp_path: Path, hub: list[tuple[str, str | None]]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_config(str(tmp_path)) == QWEN
    assert load_config(REPOSITORY, "abc") == QWEN
    assert read_drafter(REPOSITORY, "main").model_dump() == {**QWEN_SPEC, "model": REPOSITORY}
    spec = read_drafter(REPOSITORY, overrides={"logit_scale": 2.0})
    assert (spec.model, spec.logit_scale) == (REPOSITORY, 2.0)
    assert hub == [
        (str(tmp_path), None),
        (REPOSITORY, "abc"),
        (REPOSITORY, "main"),
        (REPOSITORY, None),
    ]


@pytest.mark.parametrize(
    "content",
    ["[1]", "[" * 100_000, "", "{", "9" * 5000],
    ids=["list", "deep", "empty", "half", "long number"],
)
def test_a_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DrafterError, match=f"^drafter '{tmp_path}': config.json cannot be read: "):
        load_config(str(tmp_path))


@pytest.mark.parametrize("content", ["null", "3", "true", '"text"', "[]", "[1]"])
def test_json_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DrafterError, match=r"config\.json cannot be read: it is not an object\.$"):
        load_config(str(tmp_path))


def test_a_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(DrafterError, match=r"this folder has no config\.json"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("found", [[1], None])
def test_a_hub_that_gives_no_object(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    monkeypatch.setattr(PretrainedConfig, "get_config_dict", lambda *_, **__: (found, {}))
    with pytest.raises(DrafterError, match=r"config\.json cannot be read: it is not an object\.$"):
        load_config(REPOSITORY)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(
        DrafterError, match=f"^drafter '{tmp_path}': this folder has no config.json"
    ):
        load_config(str(tmp_path))
    with pytest.raises(DrafterError, match=r"'\./none': this folder does not exist"):
        load_config("./none")


NESTED = QWEN["dflash_config"]


@pytest.mark.parametrize(
    ("overrides", "means"),
    [
        ({}, {}),
        ({"block_size": 8, "is_causal": True}, {"block_size": 8, "causal": (True,) * 5}),
        ({"dflash_config": {"mask_token_id": 7}}, {"mask_token_id": 7}),
        ({"rope_theta": 9.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
        # The second changes nothing without the first; the first is refused without the second.
        (
            {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64},
            {"windows": (64,) * 5, "causal": (True,) * 5},
        ),
    ],
)
def test_each_override_changes_something(overrides: Fields, means: Fields) -> None:
    before = json.dumps([QWEN, overrides])
    assert parse_overridden("it", QWEN, overrides).model_dump() == {**QWEN_SPEC, **means}
    assert json.dumps([QWEN, overrides]) == before


@pytest.mark.parametrize(
    ("overrides", "means"),
    [
        ({"rope_theta": 9.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
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
    rotation = ("rope_theta", "rope_parameters", "rope_scaling")
    layers = SPECULATORS["transformer_layer_config"].items()
    config = {
        **SPECULATORS,
        "transformer_layer_config": {name: value for name, value in layers if name not in rotation},
    }
    spec = parse_overridden("it", config, overrides).model_dump()
    assert {name: spec[name] for name in means} == means


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ({**QWEN, "dflash_config": None}, {"dflash_config": NESTED}),
        ({**QWEN, "dflash_config": 3}, {"dflash_config": NESTED}),
    ],
)
def test_an_override_stands_for_what_is_no_object(config: Fields, overrides: Fields) -> None:
    assert parse_overridden("it", config, overrides).model_dump() == QWEN_SPEC


@pytest.mark.parametrize(
    ("overrides", "idle"),
    [
        ({"block_size": 16}, ["block_size"]),
        ({"block_sizes": 9}, ["block_sizes"]),
        ({"zzz": 1, "block_size": 8, "sliding_window": 9}, ["zzz", "sliding_window"]),
    ],
)
def test_an_override_that_changes_nothing(overrides: Fields, idle: list[str]) -> None:
    with pytest.raises(DrafterError) as refused:
        parse_overridden("it", QWEN, overrides)
    assert str(refused.value) == (
        f"drafter 'it': drafter_overrides: {idle} changes nothing in how the drafter is"
        " read. Correct or remove it."
    )


def test_an_override_of_the_length_is_refused_unless_it_changes_the_rotation() -> None:
    """vLLM reads it from the file, so it would not change how long requests are drafted."""
    override = {"max_position_embeddings": 4096}
    for config in (QWEN, {key: value for key, value in QWEN.items() if key not in override}):
        with pytest.raises(DrafterError, match='"max_model_len" of the speculative config'):
            parse_overridden("it", config, override)
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
