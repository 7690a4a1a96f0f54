"""Bad input stops with a clear message before any engine process starts.

`create_engine_config` is what both `LLM(...)` and `vllm serve` call before starting anything.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from support.drafter_harness import DrafterHarness
from support.pairs import Pair, as_speculators, changed_drafter, drafter_config, make_pair
from vllm_dflash.checkpoint.headers import Tensor, read_folder
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.checkpoint.tensors import check_tensors
from vllm_dflash.config import pair as pair_check
from vllm_dflash.config.mode import Mode

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
NESTED = ("target_layer_ids", "mask_token_id")
"""Fields of the config's `dflash_config`."""


def nested(**changes: Any) -> dict[str, Any]:
    return drafter_config(dflash_config=changes)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(Path(tmp_path_factory.mktemp("pair")))


def refusal(pair: Pair, *, engine: dict[str, Any] | None = None, **speculative: Any) -> str:
    """Return the message a user gets."""
    config = {"method": "dflash", "model": str(pair.drafter), **speculative}
    settings: dict[str, Any] = {"model": str(pair.target), "max_model_len": 256, "dtype": "float32"}
    args = EngineArgs(
        **settings | (engine or {}),
        skip_tokenizer_init=True,
        speculative_config={key: value for key, value in config.items() if value is not None},
    )
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the caller reads the message
        args.create_engine_config()
    return str(refused.value)


def test_drafter_folder_without_config(pair: Pair, tmp_path: Path) -> None:
    """Missing or damaged folders and files are tested in test_faults.py."""
    assert "has no config.json" in refusal(pair, model=str(tmp_path))


def test_not_a_dflash_checkpoint(pair: Pair) -> None:
    message = refusal(pair, model=str(pair.target))
    assert "is not a DFlash checkpoint" in message
    assert "Qwen3ForCausalLM" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": [1, 4]}, "target_layer_ids [4] lie outside the target"),
        ({"target_layer_ids": [1, 4]}, "numbered 0 to 3"),
        ({"hidden_size": 96}, "reads hidden states of size 96, the target's hidden_size is 64"),
        ({"vocab_size": 1345}, "vocab_size is 1345 in the drafter and 320 in the target"),
        ({"num_target_layers": 36}, "num_target_layers is 36 in the drafter, the target has 4"),
        ({"head_dim": 12}, "head_dim is 12: vLLM's CPU kernels need a multiple of 8"),
        ({"hidden_size": 60, "target_hidden_size": 64}, "hidden_size is 60: vLLM's CPU kernels"),
        ({"mask_token_id": 320}, "mask_token_id 320 is outside the target's vocabulary of 320"),
    ],
    ids=str,
)
def test_a_drafter_that_does_not_fit_the_target(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    inner = {key: value for key, value in changes.items() if key in NESTED}
    outer = {key: value for key, value in changes.items() if key not in NESTED}
    drafter = changed_drafter(tmp_path, **outer, dflash_config=inner)
    assert message in refusal(pair, model=str(drafter))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3'"),
        (
            {**as_speculators(drafter_config()), "speculators_config": None},
            "has speculators_model_type but no speculators_config, by which vLLM recognises",
        ),
        (nested(target_layer_ids=[2, 0]), "must be strictly ascending"),
        (nested(sample_from_anchor=True), "sample_from_anchor is true, so"),
        (
            drafter_config(rope_parameters={"sliding_attention": {"rope_theta": 1.0}}),
            "rope_parameters differs by layer type (sliding_attention), and has no entry for",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_is_refused(
    pair: Pair, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert message in refusal(pair, model=str(tmp_path))


def test_another_width_needs_an_embedding_and_a_head(pair: Pair, tmp_path: Path) -> None:
    model = changed_drafter(tmp_path, hidden_size=96, target_hidden_size=64)
    file = model / "model.safetensors"
    tensors = load_file(file)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    save_file(tensors, file)
    message = refusal(pair, model=str(model))
    assert "missing embed_tokens.weight [320, 96]" in message
    assert "missing lm_head.weight [320, 96]" in message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": None}, ["add 'model' to the speculative config"]),
        *(({"num_speculative_tokens": n}, ["must be a positive"]) for n in (0, -1, "x", 2.5)),
        (
            {"num_speculative_token": 3},
            ["unknown option 'num_speculative_token'", "did you mean 'num_speculative_tokens'"],
        ),
        ({"use_heterogeneous_vocab": True}, ["remove 'use_heterogeneous_vocab'"]),
        *(
            ({"draft_length": asked}, [f"not {asked!r}", "'adaptive'", "'fixed'"])
            for asked in ("adaptve", 3, False, ["fixed"])
        ),
        *(
            ({"drafter_overrides": overrides}, words)
            for overrides, words in (
                ({"sliding_windows": 20}, ["'sliding_windows'", "changes nothing"]),
                (
                    {**WINDOWS, "sliding_window_size": 9},
                    ["'sliding_window_size'", "changes nothing"],
                ),
                ({**WINDOWS, "sliding_window": "wide"}, ["config.json says 'wide'"]),
                (["is_causal"], ["drafter_overrides must be an object"]),
            )
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_settings_that_are_refused(pair: Pair, asked: dict[str, Any], words: list[str]) -> None:
    message = refusal(pair, **asked)
    assert [word for word in words if word not in message] == []


def test_target_without_taps(pair: Pair, tmp_path: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=320,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        word_embed_proj_dim=64,
        max_position_embeddings=512,
    )
    OPTForCausalLM(config).save_pretrained(tmp_path)
    message = refusal(pair, engine={"model": str(tmp_path)})
    assert "OPTForCausalLM gives no hidden states" in message


def test_weights_that_do_not_match_the_config(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    tensors["layers.2.mlp.up_proj.weight"] = tensors["norm.weight"].clone()
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(pair, model=str(tmp_path))
    assert "missing layers.1.mlp.up_proj.weight [96, 64]" in message
    assert "surplus layers.2.mlp.up_proj.weight [64]" in message
    assert "fc.weight has shape [64, 64], config.json implies [64, 128]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool])
def test_weights_that_are_integers(pair: Pair, tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights may be quantised without config.json saying so. Each tensor is named."""
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    odd = ("fc.weight", "layers.1.mlp.up_proj.weight")
    for name in odd:
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(pair, model=str(tmp_path))
    stored = {"int8": "I8", "uint8": "U8", "int32": "I32", "bool": "BOOL"}
    kind = stored[str(dtype).removeprefix("torch.")]
    assert all(f"{name} is stored as {kind}: unquantised tensors" in message for name in odd)
    assert message.count("is stored as") == 2


def test_integers_from_a_hub_are_refused_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its headers were not read before."""
    pair = make_pair(tmp_path)
    tensors = load_file(pair.drafter / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].char()
    save_file(tensors, pair.drafter / "model.safetensors")
    monkeypatch.setattr(pair_check, "check_tensors", lambda *_: None)
    with pytest.raises(DrafterError, match=r"fc\.weight is stored as int8"):
        DrafterHarness(pair)


def test_maps_between_vocabularies_are_integers(pair: Pair) -> None:
    tensors = read_folder(pair.drafter).tensors
    maps = {"d2t": Tensor((320,), "I64"), "t2d": Tensor((320,), "BOOL")}
    check_tensors(pair.spec, {**tensors, **maps})


def test_weights_cut_short_behind_their_header(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    message = refusal(pair, model=str(tmp_path))
    assert "model.safetensors" in message
    assert "cannot be read" in message
    assert "download it again" in message


@pytest.mark.parametrize("asked", [None, "adaptive", "fixed"])
def test_draft_length_reaches_the_workers(pair: Pair, asked: str | None) -> None:
    speculative = {"method": "dflash", "model": str(pair.drafter), "draft-length": asked}
    args = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config={key: value for key, value in speculative.items() if value},
    )
    config = args.create_engine_config()
    assert Mode.of(config).draft_length == (asked or "adaptive")


def test_overrides_stand_in_for_config_json(pair: Pair) -> None:
    written = read_drafter(str(pair.drafter))
    assert (written.windows, written.causal) == ((None, None), (False, False))
    spec = read_drafter(str(pair.drafter), overrides=WINDOWS)
    assert (spec.windows, spec.causal) == ((20, None), (True, False))
    spec = read_drafter(str(pair.drafter), overrides={**WINDOWS, "is_causal": False})
    assert (spec.windows, spec.causal) == ((20, None), (False, False))
    nested = read_drafter(str(pair.drafter), overrides={"dflash_config": {"mask_token_id": 7}})
    assert nested == written.model_copy(update={"mask_token_id": 7})
