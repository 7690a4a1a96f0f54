"""Published drafters: each is read, left to vLLM, or refused with what to do.

`tests/data/published` has each `config.json`, as published if it was available. Fields that were
not are named in `rebuilt`, and come from the target or from drafters of the same family.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from support import ROOT
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.checkpoint.spec import DFlash2, DrafterError
from vllm_dflash.config.left_to_vllm import architecture_of_vllm

FOLDER = ROOT / "tests" / "data" / "published"
PUBLISHED: dict[str, dict[str, Any]] = {
    file.stem.replace("--", "/", 1): json.loads(file.read_text())
    for file in sorted(FOLDER.glob("*.json"))
}
"""Entries by name; the name of an earlier revision ends in "--first"."""

READ = [name for name, entry in PUBLISHED.items() if "means" in entry]
LEFT_TO_VLLM = {
    "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark": "Qwen3DSparkModel",
    "RedHatAI/GLM-5.3-speculator.dspark": "Qwen3DSparkModel",
    "meta-models/Muse-Glimmer-30B-assistant": "DFlashMuseGlimmerAssistantModel",
    "poolside/Laguna-XS-2.1-DFlash": "DFlashLagunaForCausalLM",
}
REFUSED = {
    "JetSpec/jetspec-qwen3-30b-a3b": "Use a DFlash drafter for the same target",
    "JetSpec/jetspec-qwen3-8b": "Use a DFlash drafter for the same target",
    "RadixArk/Qwen3.8-27B-DSpark": 'Write "method": "dspark" in the speculative config',
    "deepseek-ai/dflash_qwen3_8b_block7": 'Write "method": "dspark" in the speculative config',
    "shanjiaz/dflash-test": "aux_hidden_state_layer_ids must be a list of numbers from 1",
}
OF_ALL = DFlash2(conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16)
DFLASH2 = {
    "RedHatAI/Qwen3-4B-speculator.dflash2": ((0, 8, 16, 24, 32), OF_ALL),
    "canada-quant/GLM-5.3-Flash-DFlash2-G": ((5, 9, 14, 19, 24, 28, 33, 38, 42), OF_ALL),
    "incoai/GLM-5.3-DFlash2": ((5, 19, 33, 47, 61, 75), OF_ALL),
    "incoai/GLM-5.3-Flash-DFlash2": ((5, 14, 24, 33, 42), OF_ALL),
    "z-lab/Muse-Glimmer-30B-DFlash2": (
        (1, 13, 25, 37, 49),
        OF_ALL.model_copy(
            update={"output_multiplier": 0.19611613513818404, "final_logit_softcapping": 20.0}
        ),
    ),
    "z-lab/Qwen3.8-27B-DFlash2": ((5, 19, 33, 47, 61), OF_ALL),
}
"""Taps, and the fields that only DFlash 2 has."""
QUANTISED = [
    "inference-optimization/Qwen3-8B-DFlash-FP8-BLOCK",
    "inference-optimization/Qwen3-8B-DFlash-FP8-DYNAMIC",
    "lued/Qwen3.8-27B-DFlash2-W8",
    "syvai/Qwen3.8-27B-DFlash2-W4A16",
]


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = PUBLISHED[name]["config"]
    return config


def as_json(spec: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(spec.model_dump_json())
    return read


def test_each_of_them_is_in_one_list() -> None:
    listed = Counter([*READ, *LEFT_TO_VLLM, *REFUSED, *DFLASH2, *QUANTISED])
    assert max(listed.values()) == 1
    assert len(READ) == 28
    assert sorted(listed) == sorted(PUBLISHED)
    assert len({entry["checkpoint"] for entry in PUBLISHED.values()}) >= 40


@pytest.mark.parametrize("name", READ)
def test_it_is_read_as_it_was_trained(name: str) -> None:
    means = PUBLISHED[name]["means"]
    assert {"block_size", "mask_token_id", "taps", "num_layers", "windows", "causal"} <= set(means)
    spec = parse_config(name, config_of(name))
    assert {key: as_json(spec)[key] for key in means} == means
    assert spec.num_layers == len(spec.windows) == len(spec.causal)


@pytest.mark.parametrize("name", PUBLISHED)
def test_which_are_left_to_vllm(name: str) -> None:
    assert architecture_of_vllm(config_of(name)) == LEFT_TO_VLLM.get(name)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(DrafterError) as refused:
        parse_config(name, config_of(name))
    assert REFUSED[name] in str(refused.value)


@pytest.mark.parametrize("name", DFLASH2)
def test_dflash2_is_read(name: str) -> None:
    spec = parse_config(name, config_of(name))
    assert (spec.taps, spec.dflash2) == DFLASH2[name]
    assert spec.block_size == (16 if "Muse" in name else 8)
    window = None if name.endswith("-G") else 2048  # its layers see the whole context
    assert spec.windows == (window,) * spec.num_layers
    assert spec.causal == (False,) * spec.num_layers
    assert spec.remarks == ()


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_ones_are_read(name: str) -> None:
    """Like their originals, apart from a quantisation method, which vLLM implements."""
    spec = parse_config(name, config_of(name))
    assert spec.quantization == "compressed-tensors"
    assert (spec.dflash2 == OF_ALL) == ("DFlash2" in name)
    plain = {key: value for key, value in config_of(name).items() if key != "quantization_config"}
    assert spec.model_copy(update={"quantization": None}) == parse_config(name, plain)
