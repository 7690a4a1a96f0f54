"""Which code runs a drafter: ours, vLLM's, or none. Without an engine's settings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config import left_to_vllm
from vllm_dflash.config.left_to_vllm import architecture_of_vllm, config_of_drafter, why_left


def architectures(*names: Any) -> dict[str, Any]:
    return {"architectures": list(names)}


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (architectures("DFlashDraftModel"), None),
        (architectures("DFlash2DraftModel", "DFlashDraftModel"), None),
        (architectures("LagunaForCausalLM"), "DFlashLagunaForCausalLM"),
        (architectures("LiLiCorrDraftModel"), None),
        (architectures("2DraftModel"), None),  # known only with DFlash before its name
        (architectures("DraftModel"), None),
        (architectures(), None),
        (architectures("DFlash2DraftModel", 3), None),
        ({"architectures": None}, None),
        ({}, None),
        ({"speculators_model_type": "dflash"}, None),
        ({"speculators_model_type": "dspark"}, "Qwen3DSparkModel"),
        ({"speculators_model_type": "eagle3", **architectures("DFlash2DraftModel")}, None),
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


def why(requested: dict[str, Any], *, has_watermark: bool = False, **changes: Any) -> list[str]:
    """Return reasons for an engine that is ours except for its drafter, and these changes to its
    parallel config."""
    target: Any = SimpleNamespace(is_moe=False, is_hybrid=False, is_multimodal_model=False)
    parallel: Any = SimpleNamespace(
        worker_cls="auto",
        pipeline_parallel_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        distributed_executor_backend="mp",
    )
    vars(parallel).update(changes)
    config = config_of_drafter(requested)
    return why_left(requested, config, target, parallel, has_watermark=has_watermark)


@pytest.mark.parametrize("model", [None, "", 3, ["a"]])
def test_without_a_drafter_there_is_no_config(model: Any) -> None:
    """A missing model is reported later, with the settings as a whole."""
    for requested in ({"method": "dflash", "model": model}, {"method": "dflash"}):
        assert config_of_drafter(requested) == {}
        assert why(requested) == []


@pytest.mark.parametrize(
    ("has_watermark", "method", "is_left"),
    [(True, "probabilistic", True), (True, "greedy", False), (False, "probabilistic", False)],
)
def test_watermarks_of_sampled_drafts(
    tmp_path: Path, has_watermark: bool, method: str, is_left: bool
) -> None:
    """vLLM 0.33 has watermarks; with other drafts, no vLLM engine starts."""
    requested = {
        **write(tmp_path, architectures("DFlashDraftModel")),
        "draft_sample_method": method,
    }
    reasons = why(requested, has_watermark=has_watermark)
    assert [("a watermark needs" in reason) for reason in reasons] == [True] * is_left


@pytest.mark.parametrize(
    ("config", "its_runner", "is_left"),
    [
        (architectures("DFlash2DraftModel"), "v2", True),
        (architectures("LiLiCorrDraftModel"), "v2", True),
        ({"speculators_model_type": "dflash2"}, "v2", True),
        (architectures("DFlash2DraftModel"), "v1", False),  # vLLM refuses it
        (architectures("DFlashDraftModel"), "v2", False),
        ({"speculators_model_type": "dflash"}, "v2", False),
    ],
)
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_drafters_whose_drafts_can_be_sampled(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: dict[str, Any],
    its_runner: str,
    is_left: bool,
    method: str,
) -> None:
    """Walks choose each token by the one before it, so vLLM's own DFlash can sample them."""
    monkeypatch.setattr(left_to_vllm, "runner_here", lambda: its_runner)
    reasons = why({**write(tmp_path, config), "draft_sample_method": method})
    said = [reason.startswith("draft_sample_method is 'probabilistic'") for reason in reasons]
    assert said == [True] * (is_left and method == "probabilistic")


@pytest.mark.parametrize("written", ["Qwen3XPressModel", "DFlash2BeamDraftModel"])
def test_drafters_that_vllm_033_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str
) -> None:
    """Its registry has each architecture under its own name and under a DFlash drafter's."""
    name = written if written.startswith("DFlash") else f"DFlash{written}"
    for each in {written, name}:
        monkeypatch.setitem(ModelRegistry.models, each, ModelRegistry.models["DFlashDraftModel"])
    (reason,) = why(write(tmp_path, architectures(written)))
    assert f"has architecture {name}, which vLLM's own code runs" in reason


FIXED = {"draft_length": "fixed"}


@pytest.mark.parametrize(
    ("size", "asked", "its_runner", "is_left"),
    [
        (2, {}, "v2", True),
        (2, FIXED, "v2", False),
        (2, {**FIXED, "draft_window": 256}, "v2", False),
        (2, {**FIXED, "draft_window": "auto"}, "v2", True),
        (1, {}, "v2", False),
        (2, {}, "v1", False),  # its ranks use the first rank's times
    ],
)
def test_adaptive_lengths_with_an_external_launcher_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    size: int,
    asked: dict[str, Any],
    its_runner: str,
    is_left: bool,
) -> None:
    monkeypatch.setattr(left_to_vllm, "runner_here", lambda: its_runner)
    requested = write(tmp_path, architectures("DFlashDraftModel")) | asked
    assert why(requested, tensor_parallel_size=size) == []
    reasons = why(
        requested, tensor_parallel_size=size, distributed_executor_backend="external_launcher"
    )
    assert ["external_launcher" in reason for reason in reasons] == [True] * is_left


def test_fly_is_left_to_vllm(tmp_path: Path) -> None:
    """A way of verifying drafts that vLLM 0.33 has."""
    requested = write(tmp_path, architectures("DFlashDraftModel"))
    (reason,) = why({**requested, "rejection_sample_method": "fly"})
    assert "rejection_sample_method is 'fly'" in reason


def test_no_such_drafter(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"this folder has no config\.json"):
        config_of_drafter({"model": str(tmp_path)})
