"""Whose code runs a drafter: ours, vLLM's, or nobody's. Without an engine's settings."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from support.log_lines import log_lines
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config.left_to_vllm import architecture_of_vllm, config_to_run


def architectures(*names: Any) -> dict[str, Any]:
    return {"architectures": list(names)}


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (architectures("DFlashDraftModel"), None),
        (architectures("DFlash2DraftModel"), None),
        (architectures("DFlash2DraftModel", "DFlashDraftModel"), None),
        (architectures("LagunaForCausalLM"), "DFlashLagunaForCausalLM"),
        (architectures("Nonsense", "LagunaForCausalLM"), "DFlashLagunaForCausalLM"),
        (architectures("LiLiCorrDraftModel"), None),
        (architectures("MuseGlimmerAssistantModel"), "DFlashMuseGlimmerAssistantModel"),
        (architectures("Nonsense"), None),
        (architectures("2DraftModel"), None),  # whose name with DFlash before it would be known
        (architectures("LlamaForCausalLM"), None),
        (architectures("DraftModel"), None),
        (architectures("Nonsense", "DraftModel", "LlamaForCausalLM"), None),
        (architectures(), None),
        (architectures("DFlash2DraftModel", 3), None),
        ({"architectures": "DFlash2DraftModel"}, None),
        ({"architectures": None}, None),
        ({}, None),
        ({"speculators_model_type": "dflash"}, None),
        ({"speculators_model_type": "dflash2"}, None),
        ({"speculators_model_type": "dspark"}, "Qwen3DSparkModel"),
        ({"speculators_model_type": "eagle3", **architectures("DFlash2DraftModel")}, None),
        ({"speculators_model_type": ["dflash2"], **architectures("DFlash2DraftModel")}, None),
        (
            {"speculators_model_type": None, **architectures("LagunaForCausalLM")},
            "DFlashLagunaForCausalLM",
        ),
    ],
)
def test_architectures(config: dict[str, Any], architecture: str | None) -> None:
    assert architecture_of_vllm(config) == architecture


def write(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return {"method": "dflash", "model": str(folder)}


def test_a_drafter_of_ours(tmp_path: Path) -> None:
    for name in ("DFlashDraftModel", "LiLiCorrDraftModel", "Nonsense"):
        config = architectures(name)
        with log_lines() as lines:
            assert config_to_run(write(tmp_path, config)) == config
        assert lines == []


@pytest.mark.parametrize("model", [None, "", 3, ["a"]])
def test_without_a_drafter_there_is_no_config(model: Any) -> None:
    """That a model is missing is said later, of the settings as a whole."""
    assert config_to_run({"method": "dflash", "model": model}) == {}
    assert config_to_run({"method": "dflash"}) == {}


def test_the_revision_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_config(*where: Any) -> dict[str, Any]:
        asked.append(where)
        return {}

    monkeypatch.setattr("vllm_dflash.config.left_to_vllm.load_config", load_config)
    config_to_run({"model": "someone/drafter", "revision": "abc"})
    config_to_run({"model": "someone/drafter"})
    assert asked == [("someone/drafter", "abc"), ("someone/drafter", None)]


@pytest.mark.parametrize(
    ("config", "architecture", "hint"),
    [
        (architectures("LagunaForCausalLM"), "DFlashLagunaForCausalLM", False),
        ({"speculators_model_type": "dspark"}, "Qwen3DSparkModel", True),
    ],
)
def test_a_drafter_of_vllms(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    architecture: str,
    hint: bool,
) -> None:
    caplog.set_level(logging.INFO, "vllm.dflash")  # as vLLM sets it once an engine is asked for
    requested = write(tmp_path, config)
    with log_lines() as lines:
        assert config_to_run(requested) is None
    (line,) = lines
    assert line.startswith(f"INFO vllm-dflash stays out: drafter '{tmp_path}' has architecture")
    assert f"has architecture {architecture}, which vLLM's own code runs" in line
    assert line.endswith('write "method": "dspark"' if hint else "code runs")
    for own in (["draft_length"], ["draft_length", "drafter_overrides"]):
        with pytest.raises(ValueError, match=f"Remove {', '.join(map(repr, own))} from") as refused:
            config_to_run({**requested, **dict.fromkeys(own, 1)})
        assert architecture in str(refused.value)


def test_no_such_drafter(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"this folder has no config\.json"):
        config_to_run({"model": str(tmp_path)})
