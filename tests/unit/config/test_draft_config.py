"""vLLM's reading of a drafter's config: what is hidden from it, told to it, and blamed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import LoadConfig

from support.configs_by_hand import GPT_OSS
from support.log_lines import log_lines
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.draft_config import (
    describe_to_vllm,
    drafted_length,
    load_safetensors,
    read_by_vllm,
)

DRAFTER = parse_config("it", GPT_OSS)
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
        target_model_config=hf(max_model_len=TARGETS_LENGTH, model_weights=""),
        max_model_len=asked,
        draft_load_config=LoadConfig(load_format="safetensors"),
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
    args = SimpleNamespace(
        speculative_config={"max_model_len": limit}, create_load_config=LoadConfig
    )
    target: Any = SimpleNamespace(trust_remote_code=False)
    found = read_by_vllm(reads, cast("Any", args), target, drafter)
    is_kept = rope == "default" and limit > drafter.max_position_embeddings == 131_072
    assert given == [None if is_kept else limit]
    if rope == "default":
        assert drafted_length(found.draft_model_config) == limit


@pytest.mark.parametrize(
    ("target", "of_target", "own", "found"),
    [
        ("", "auto", None, "safetensors"),
        ("", "ipc_cache", None, "safetensors"),  # from which vLLM takes only the target
        ("", "runai_streamer", None, None),
        ("", "runai_streamer", "auto", "safetensors"),
        ("", "auto", "dummy", "dummy"),
        ("s3://bucket/target", "auto", None, None),  # vLLM streams both
        ("s3://bucket/target", "auto", "auto", "safetensors"),
    ],
)
def test_how_a_drafter_is_loaded(
    target: str, of_target: str, own: str | None, found: str | None
) -> None:
    config = vllms(hf(), hf())
    config.target_model_config.model_weights = target
    config.method, config.draft_load_config = "dflash", own and LoadConfig(load_format=own)
    args: Any = SimpleNamespace(create_load_config=lambda: LoadConfig(load_format=of_target))
    load_safetensors(config, args)
    assert (config.draft_load_config and config.draft_load_config.load_format) == found


def test_what_vllm_cannot_read_is_said_with_the_files_name() -> None:
    """Its own errors may be a bare IndexError."""

    def fails(_: Any) -> Any:
        raise IndexError("1 validation error\nValue error, no divisor")

    args: Any = SimpleNamespace(speculative_config={})
    target: Any = SimpleNamespace(trust_remote_code=True)
    with log_lines() as lines, pytest.raises(IndexError):
        read_by_vllm(fails, args, target, DRAFTER)
    assert lines == [
        "ERROR vLLM cannot read the speculative config, or the config.json of drafter 'it': Value"
        " error, no divisor (IndexError)"
    ]
    assert target.trust_remote_code
