"""vLLM's reading of a drafter's config: what is hidden from it, told to it, and blamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.configs_by_hand import GPT_OSS, Fields
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.draft_config import (
    config_error,
    describe_to_vllm,
    drafted_length,
    read_by_vllm,
)

DRAFTER = parse_config("it", GPT_OSS)
PLAIN = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 201088,
    "hidden_size": 1440,
    "intermediate_size": 7680,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 131072,
}
OWN_LENGTH, TARGETS_LENGTH = 4096, 32768
TOLD = {
    "mask_token_id": 200000,
    "target_layer_ids": [1, 6, 11, 16, 21],
    "max_model_len": OWN_LENGTH,
}


def hf(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


def vllms(hf_config: SimpleNamespace, text: SimpleNamespace, asked: int | None = None) -> Any:
    draft = hf(hf_config=hf_config, hf_text_config=text, max_model_len=OWN_LENGTH)
    draft.model_arch_config = hf(architectures=["DFlash2DraftModel"])
    return SimpleNamespace(
        draft_model_config=draft,
        target_model_config=hf(max_model_len=TARGETS_LENGTH),
        max_model_len=asked,
    )


def test_what_vllm_is_told() -> None:
    """Taps and mask token where vLLM looks for them; no windows, which we take from the spec; and
    one architecture for both kinds of DFlash."""
    written = {"use_swa": True, "mask_token_id": 4}
    outer = hf(dflash_config=written, layer_types=["sliding_attention", "full_attention"], x=1)
    inner = hf(layer_types=None)
    config = vllms(outer, inner)
    assert describe_to_vllm(config, DRAFTER) is config
    assert outer.dflash_config == {"use_swa": True, **TOLD}
    assert written == {"use_swa": True, "mask_token_id": 4}
    assert (outer.layer_types, outer.x) == (["full_attention", "full_attention"], 1)
    ours = ["DFlashDraftModel"]
    assert inner == hf(layer_types=None, dflash_config=TOLD, architectures=ours)
    assert outer.architectures == ours
    assert config.draft_model_config.model_arch_config.architectures == ours
    bare = hf(dflash_config=None)
    describe_to_vllm(vllms(bare, bare), DRAFTER)
    assert bare == hf(dflash_config=TOLD, architectures=ours)
    # vLLM's speculator refuses it.
    anchored = hf(dflash_config={"sample_from_anchor": True})
    describe_to_vllm(vllms(anchored, anchored), DRAFTER)
    assert anchored.dflash_config == TOLD
    # Of a drafter in the format of the speculators library; vLLM looks there first.
    speculators = hf(eagle_aux_hidden_state_layer_ids=[99])
    describe_to_vllm(vllms(speculators, speculators), DRAFTER)
    assert speculators.eagle_aux_hidden_state_layer_ids == [tap + 1 for tap in DRAFTER.taps]


@pytest.mark.parametrize("asked", [None, 4096, 9000, 99_999])
@pytest.mark.parametrize(
    ("rope", "goes_on"),
    [("yarn", False), ("dynamic", False), ("default", True), ("linear", True), ("llama3", True)],
)
@pytest.mark.parametrize(("own", "told"), [(4096, 32768), (32768, 32768), (40960, 40960)])
def test_a_short_drafter_does_not_shorten_its_target(
    own: int, told: int, rope: str, goes_on: bool, asked: int | None
) -> None:
    """If positions go on, vLLM 0.33 keeps drafting; otherwise it limits both models to the shorter
    length. Ours does not draft for longer requests instead."""
    config = vllms(hf(), hf(), asked)
    config.draft_model_config.max_model_len = own
    drafter = DRAFTER.model_copy(update={"rope_parameters": {"rope_type": rope}})
    assert drafter.positions_go_on == goes_on
    draft = describe_to_vllm(config, drafter).draft_model_config
    drafted = min(asked or told, told) if goes_on else own
    assert (draft.max_model_len, drafted_length(draft)) == (told, drafted)
    assert config.target_model_config.max_model_len == TARGETS_LENGTH


Bad = Callable[[Fields], str | None]


class Reader:
    """Stand-in for vLLM's reading of the drafter: fails if `bad` gives a reason."""

    def __init__(self, bad: Bad) -> None:
        self.bad = bad
        self.read: list[Fields] = []
        self.asked: list[dict[str, Any]] = []
        self.spec_models: list[Any] = []

    def __call__(self, engine_args: Any) -> Any:
        written = engine_args.speculative_config
        self.asked.append({key: value for key, value in written.items() if key != "model"})
        self.spec_models.append(engine_args.spec_model)
        self.read.append(json.loads((Path(written["model"]) / "config.json").read_text()))
        if why := self.bad(self.read[-1]):
            raise IndexError(why)
        return vllms(hf(), hf())


def arguments(folder: str = "somewhere", **speculative: Any) -> Any:
    config = {"model": folder, "revision": "abc", "method": "dflash", **speculative}
    return SimpleNamespace(spec_model="by flag", speculative_config=config)


def test_the_field_to_blame_is_found_by_trial() -> None:
    config = {**GPT_OSS, "odd": [1], "n_predict": 0}
    reader = Reader(lambda fields: "no divisor" if fields.get("n_predict") == 0 else None)
    args = arguments()
    fault = config_error(DRAFTER, config, args, reader)
    assert isinstance(fault, DrafterError)
    assert str(fault) == (
        "drafter 'it': bad config: vLLM cannot read n_predict of config.json, which is 0:"
        " no divisor (IndexError)"
    )
    assert reader.read[0] == PLAIN
    assert reader.read[1:] == [{**PLAIN, name: value} for name, value in config.items()]
    # All else is unchanged, except the revision, which belongs to the repository.
    assert reader.asked == [{"method": "dflash"}] * len(reader.asked)
    assert set(reader.spec_models) == {None}
    assert args == arguments()


def test_fields_that_do_not_go_together() -> None:
    config = {**GPT_OSS, "a": 1, "b": 2}
    reader = Reader(
        lambda fields: (
            "1 validation error\nValue error, both" if {"a", "b"} <= fields.keys() else None
        )
    )
    fault = config_error(DRAFTER, config, arguments(), reader)
    assert str(fault) == (
        "drafter 'it': bad config: vLLM cannot read config.json: both (IndexError)"
    )
    assert reader.read[-1] == config


@pytest.mark.parametrize("rope", ["default", "yarn"])
@pytest.mark.parametrize("limit", [4096, 131_072, 200_000])
def test_a_limit_beyond_the_drafters_positions_is_kept_from_vllm(rope: str, limit: int) -> None:
    """vLLM refuses it, although with this RoPE longer requests can be drafted."""
    config, given = vllms(hf(), hf()), []

    def reads(engine_args: Any) -> Any:
        given.append(engine_args.speculative_config.get("max_model_len"))
        config.max_model_len = given[-1]
        return config

    config.target_model_config.max_model_len = 300_000
    drafter = DRAFTER.model_copy(update={"rope_parameters": {"rope_type": rope}})
    args = SimpleNamespace(speculative_config={"max_model_len": limit})
    target: Any = SimpleNamespace(trust_remote_code=False)
    found = read_by_vllm(reads, cast("Any", args), target, drafter, GPT_OSS)
    is_kept = rope == "default" and limit > drafter.max_position_embeddings == 131_072
    assert given == [None if is_kept else limit]
    if rope == "default":
        assert drafted_length(found.draft_model_config) == limit


def test_the_trial_starts_from_what_was_asked(tmp_path: Path) -> None:
    """vLLM writes into the arguments before it fails."""
    (tmp_path / "config.json").write_text(json.dumps({**GPT_OSS, "n_predict": 0}))
    reader = Reader(lambda fields: "no" if "n_predict" in fields else None)
    args = arguments(str(tmp_path))

    def writes(engine_args: Any) -> Any:
        try:
            return reader(engine_args)
        finally:
            engine_args.speculative_config["written by vLLM"] = True
            engine_args.speculative_config = {**engine_args.speculative_config, "more": 1}

    with pytest.raises(DrafterError, match=r"n_predict of config\.json"):
        read_by_vllm(
            writes,
            args,
            SimpleNamespace(trust_remote_code=True),
            DRAFTER,
            {**GPT_OSS, "n_predict": 0},
        )
    assert reader.asked[0] == {"method": "dflash", "revision": "abc"}
    assert reader.asked[1:] == [{"method": "dflash"}] * (len(reader.asked) - 1)
    assert args.speculative_config["more"] == 1  # the user's arguments stay as vLLM left them
