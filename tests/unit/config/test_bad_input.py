"""Bad input stops with a clear message before any engine process starts.

`create_engine_config` is what both `LLM(...)` and `vllm serve` call before starting anything.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from support.drafter_harness import DrafterHarness
from support.pairs import Pair, drafter_config, make_pair, save_drafter
from vllm_dflash.checkpoint.headers import Tensor, read_folder
from vllm_dflash.checkpoint.pairing import PairingTarget, check_pair
from vllm_dflash.checkpoint.read import read_drafter
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.checkpoint.tensors import check_tensors
from vllm_dflash.config import pair as pair_check
from vllm_dflash.config.options import DFlashOptions


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(Path(tmp_path_factory.mktemp("pair")))


def refusal(pair: Pair, *, target: Path | None = None, **speculative: Any) -> str:
    """The message a user gets."""
    config = {"method": "dflash", "model": str(pair.drafter), **speculative}
    args = EngineArgs(
        model=str(target or pair.target),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        speculative_config={key: value for key, value in config.items() if value is not None},
    )
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the caller reads the message
        args.create_engine_config()
    return str(refused.value)


def changed_drafter(folder: Path, **changes: Any) -> str:
    """A drafter whose weights fit its config, but whose config has these changes."""
    save_drafter(folder / "drafter", drafter_config(**changes))
    return str(folder / "drafter")


def test_drafter_path_missing(pair: Pair) -> None:
    message = refusal(pair, model="/nowhere/drafter")
    assert "/nowhere/drafter" in message
    assert "does not exist" in message


def test_drafter_folder_without_config(pair: Pair, tmp_path: Path) -> None:
    assert "has no config.json" in refusal(pair, model=str(tmp_path))


def test_no_drafter_named(pair: Pair) -> None:
    assert "add 'model' to the speculative config" in refusal(pair, model=None)


def test_not_a_dflash_checkpoint(pair: Pair) -> None:
    message = refusal(pair, model=str(pair.target))
    assert "is not a DFlash checkpoint" in message
    assert "Qwen3ForCausalLM" in message


def test_taps_outside_the_targets_layers(pair: Pair, tmp_path: Path) -> None:
    drafter = changed_drafter(tmp_path, dflash_config={"target_layer_ids": [1, 4]})
    message = refusal(pair, model=drafter)
    assert "target_layer_ids [4] lie outside the target" in message
    assert "numbered 0 to 3" in message


def test_taps_out_of_order(pair: Pair, tmp_path: Path) -> None:
    config = drafter_config()
    config["dflash_config"]["target_layer_ids"] = [2, 0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "must be strictly ascending" in refusal(pair, model=str(tmp_path))


def test_hidden_size_does_not_fit(pair: Pair, tmp_path: Path) -> None:
    message = refusal(pair, model=changed_drafter(tmp_path, hidden_size=96))
    assert "reads hidden states of size 96, the target's hidden_size is 64" in message


def test_another_width_needs_an_embedding_and_a_head(pair: Pair, tmp_path: Path) -> None:
    model = changed_drafter(tmp_path, hidden_size=96, target_hidden_size=64)
    file = Path(model) / "model.safetensors"
    tensors = load_file(file)
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    save_file(tensors, file)
    message = refusal(pair, model=model)
    assert "missing embed_tokens.weight [320, 96]" in message
    assert "missing lm_head.weight [320, 96]" in message


def test_speculators_of_another_kind(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    assert "speculators_model_type is 'eagle3'" in refusal(pair, model=str(tmp_path))


def test_vocabulary_does_not_fit(pair: Pair, tmp_path: Path) -> None:
    message = refusal(pair, model=changed_drafter(tmp_path, vocab_size=310))
    assert "vocab_size is 310 in the drafter and 320 in the target" in message


def test_trained_for_another_depth(pair: Pair, tmp_path: Path) -> None:
    message = refusal(pair, model=changed_drafter(tmp_path, num_target_layers=36))
    assert "num_target_layers is 36 in the drafter, the target has 4 layers" in message


def test_mask_token_outside_the_vocabulary(pair: Pair, tmp_path: Path) -> None:
    message = refusal(pair, model=changed_drafter(tmp_path, dflash_config={"mask_token_id": 320}))
    assert "mask_token_id 320 is outside the target's vocabulary of 320" in message


def test_more_drafts_than_the_block_holds(pair: Pair) -> None:
    message = refusal(pair, num_speculative_tokens=8)
    assert "num_speculative_tokens is 8" in message
    assert "block_size 8" in message
    assert "at most 7" in message


@pytest.mark.parametrize("count", [0, -1, "7", 2.5])
def test_a_number_of_drafts_that_is_none(pair: Pair, count: object) -> None:
    assert "must be a positive integer" in refusal(pair, num_speculative_tokens=count)


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
    message = refusal(pair, target=tmp_path)
    assert "OPTForCausalLM gives no hidden states" in message


def test_unknown_option_names_the_nearest(pair: Pair) -> None:
    message = refusal(pair, num_speculative_token=3)
    assert "unknown option 'num_speculative_token'" in message
    assert "did you mean 'num_speculative_tokens'" in message


def test_option_without_meaning(pair: Pair) -> None:
    assert "remove 'use_heterogeneous_vocab'" in refusal(pair, use_heterogeneous_vocab=True)


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
    """Quantised somehow, with nothing in config.json that says so: each is named."""
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    odd = ("fc.weight", "layers.1.mlp.up_proj.weight")
    for name in odd:
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(pair, model=str(tmp_path))
    stored = {"int8": "I8", "uint8": "U8", "int32": "I32", "bool": "BOOL"}
    kind = stored[str(dtype).removeprefix("torch.")]
    assert all(f"{name} is stored as {kind}: weights must be" in message for name in odd)
    assert message.count("is stored as") == 2


def test_integers_from_a_hub_are_refused_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose headers nobody read before."""
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


def test_weights_file_is_truncated(pair: Pair, tmp_path: Path) -> None:
    shutil.copytree(pair.drafter, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    message = refusal(pair, model=str(tmp_path))
    assert "cannot be read" in message
    assert "model.safetensors" in message


def test_no_weights_at_all(pair: Pair, tmp_path: Path) -> None:
    shutil.copy(pair.drafter / "config.json", tmp_path)
    assert "holds no *.safetensors file" in refusal(pair, model=str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_from_anchor", True),
        ("use_aux_hidden_state", False),
    ],
)
def test_what_is_not_supported_yet(pair: Pair, tmp_path: Path, field: str, value: object) -> None:
    config = drafter_config(dflash_config={field: value})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"{field} is {str(value).lower()}, so" in refusal(pair, model=str(tmp_path))


def test_another_worker_class(pair: Pair) -> None:
    args = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        worker_cls="some.other.Worker",
        speculative_config={"method": "dflash", "model": str(pair.drafter)},
    )
    with pytest.raises(ValueError, match=r"worker_cls is 'some\.other\.Worker'"):
        args.create_engine_config()


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"multimodal": True, "on_cpu": True}, "is multimodal"),
        ({"has_linear_attention": True, "on_cpu": True}, "linear attention"),
    ],
)
def test_parallelism_and_targets_that_do_not_fit(
    pair: Pair, parallel: dict[str, Any], message: str
) -> None:
    facts = PairingTarget("t", "Qwen3ForCausalLM", 4, 64, 320, supports_taps=True)
    check_pair(pair.spec, facts)
    check_pair(pair.spec, dataclasses.replace(facts, multimodal=True, has_linear_attention=True))
    with pytest.raises(DrafterError, match=message):
        check_pair(pair.spec, dataclasses.replace(facts, **parallel))


def test_lora(pair: Pair) -> None:
    args = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        enable_lora=True,
        speculative_config={"method": "dflash", "model": str(pair.drafter)},
    )
    with pytest.raises(ValueError, match="does not support LoRA yet"):
        args.create_engine_config()


def test_rope_per_layer_type(pair: Pair, tmp_path: Path) -> None:
    config = drafter_config(rope_parameters={"full_attention": {"rope_theta": 1.0}})
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(pair, model=str(tmp_path))
    assert "rope_parameters differs by layer type (full_attention)" in message


@pytest.mark.parametrize("asked", ["adaptve", 3, False, ["fixed"]])
def test_unknown_draft_length(pair: Pair, asked: Any) -> None:
    message = refusal(pair, draft_length=asked)
    assert f"not {asked!r}" in message
    assert "'adaptive'" in message
    assert "'fixed'" in message


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
    assert DFlashOptions.of(config).draft_length == (asked or "adaptive")


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}


def test_overrides_stand_in_for_config_json(pair: Pair) -> None:
    written = read_drafter(str(pair.drafter))
    assert (written.windows, written.causal) == ((None, None), (False, False))
    spec = read_drafter(str(pair.drafter), overrides=WINDOWS)
    assert (spec.windows, spec.causal) == ((20, None), (True, False))
    spec = read_drafter(str(pair.drafter), overrides={**WINDOWS, "is_causal": False})
    assert (spec.windows, spec.causal) == ((20, None), (False, False))
    nested = read_drafter(str(pair.drafter), overrides={"dflash_config": {"mask_token_id": 7}})
    assert nested == dataclasses.replace(written, mask_token_id=7)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sliding_windows": 20}, "'sliding_windows'. changes nothing"),
        ({**WINDOWS, "sliding_window_size": 9}, "'sliding_window_size'. changes nothing"),
        ({**WINDOWS, "sliding_window": "wide"}, "config.json says 'wide'"),
        (["is_causal"], "drafter_overrides must be an object"),
    ],
)
def test_overrides_that_mean_nothing(pair: Pair, overrides: object, message: str) -> None:
    args = EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        speculative_config={
            "method": "dflash",
            "model": str(pair.drafter),
            "drafter_overrides": overrides,
        },
    )
    with pytest.raises(ValueError, match=message):
        args.create_engine_config()
