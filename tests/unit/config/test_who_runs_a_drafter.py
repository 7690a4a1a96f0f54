"""Which code runs a drafter: ours, vLLM's, or none; and on which runner, with which worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.config import left_to_vllm
from vllm_dflash.config.engine_options import (
    CPU_WORKER_V1,
    CPU_WORKER_V2,
    GPU_WORKER,
    runner_here,
    worker_here,
)
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


PLAIN = architectures("DFlashDraftModel")


def why(
    config: dict[str, Any], *, has_watermark: bool = False, asked: Any = None, **changes: Any
) -> list[str]:
    """Return reasons for an engine that is ours except for its drafter, settings that are asked
    for, and these changes to its parallel config."""
    target: Any = SimpleNamespace(
        model="target", is_moe=True, is_hybrid=False, is_multimodal_model=False
    )
    parallel: Any = SimpleNamespace(
        worker_cls="auto",
        pipeline_parallel_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        distributed_executor_backend="mp",
        use_ubatching=False,
    )
    vars(parallel).update(changes)
    requested = {**({"model": "it"} if config else {}), **(asked or {})}
    return why_left(requested, config, target, parallel, has_watermark=has_watermark)


@pytest.mark.parametrize("model", [None, "", 3, ["a"]])
def test_without_a_drafter_there_is_no_config(model: Any) -> None:
    """A missing model is reported later, with the settings as a whole."""
    for requested in ({"method": "dflash", "model": model}, {"method": "dflash"}):
        assert config_of_drafter(requested) == {}
        assert why({}, asked=requested) == []


@pytest.mark.parametrize(
    ("has_watermark", "method", "is_left"),
    [(True, "probabilistic", True), (True, "greedy", False), (False, "probabilistic", False)],
)
def test_watermarks_of_sampled_drafts(has_watermark: bool, method: str, is_left: bool) -> None:
    """vLLM 0.33 has watermarks; with other drafts, no vLLM engine starts."""
    reasons = why(PLAIN, has_watermark=has_watermark, asked={"draft_sample_method": method})
    assert [("a watermark needs" in reason) for reason in reasons] == [True] * is_left


@pytest.mark.parametrize("its_runner", ["v1", "v2"])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("kind", ["DFlashDraftModel", "DFlash2DraftModel", "LiLiCorrDraftModel"])
def test_drawn_drafts_are_no_reason(
    monkeypatch: pytest.MonkeyPatch, its_runner: str, method: str, kind: str
) -> None:
    """We draw them on V2; on V1 nobody does."""
    monkeypatch.setattr(left_to_vllm, "runner_here", lambda: its_runner)
    assert why(architectures(kind), asked={"draft_sample_method": method}) == []


@pytest.mark.parametrize("written", ["Qwen3XPressModel", "DFlash2BeamDraftModel"])
def test_drafters_that_vllm_033_runs(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    """Its registry has each architecture under its own name and under a DFlash drafter's."""
    name = written if written.startswith("DFlash") else f"DFlash{written}"
    for each in {written, name}:
        monkeypatch.setitem(ModelRegistry.models, each, ModelRegistry.models["DFlashDraftModel"])
    (reason,) = why(architectures(written))
    assert f"has architecture {name}, which vLLM's own code runs" in reason


FIXED = {"draft_length": "fixed"}


@pytest.mark.parametrize(
    ("size", "asked", "its_runner", "is_left"),
    [
        (2, {}, "v2", True),
        (2, FIXED, "v2", False),
        (2, {**FIXED, "draft_window": 256}, "v2", False),
        (1, {}, "v2", False),
        (2, {}, "v1", False),  # its ranks use the first rank's times
    ],
)
def test_adaptive_lengths_with_an_external_launcher_are_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    asked: dict[str, Any],
    its_runner: str,
    is_left: bool,
) -> None:
    monkeypatch.setattr(left_to_vllm, "runner_here", lambda: its_runner)
    assert why(PLAIN, asked=asked, tensor_parallel_size=size) == []
    launcher = "external_launcher"
    reasons = why(
        PLAIN, asked=asked, tensor_parallel_size=size, distributed_executor_backend=launcher
    )
    assert ["external_launcher" in reason for reason in reasons] == [True] * is_left


def test_fly_is_left_to_vllm() -> None:
    """A way of verifying drafts that vLLM 0.33 has."""
    (reason,) = why(PLAIN, asked={"rejection_sample_method": "fly"})
    assert "rejection_sample_method is 'fly'" in reason


def test_no_such_drafter(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"this folder has no config\.json"):
        config_of_drafter({"model": str(tmp_path)})


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("is_v2", [None, True, False])
@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("splits", [True, False])
def test_cuda_gets_its_own_worker_on_v2(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, splits: bool
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert worker_here() == GPU_WORKER
    if is_v2 or (is_v2 is None and has_triton and not splits):
        assert runner_here() == "v2"
        assert why(PLAIN, use_ubatching=splits) == []
        assert why(PLAIN, worker_cls=GPU_WORKER, use_ubatching=splits) == []
        (reason,) = why(PLAIN, worker_cls=CPU_WORKER_V1, use_ubatching=splits)
        assert "worker_cls is" in reason
    else:
        (reason,) = why(PLAIN, use_ubatching=splits)
        assert "this engine gets V1" in reason
        assert ("--enable-dbo" in reason) == (splits and is_v2 is None)


@pytest.mark.parametrize(
    ("is_v2", "has_triton", "runner", "worker"),
    [
        (None, False, "v1", CPU_WORKER_V1),
        (None, True, "v2", CPU_WORKER_V2),  # also on a CPU: vLLM's own choice
        (False, True, "v1", CPU_WORKER_V1),
        (True, False, "v2", CPU_WORKER_V2),
    ],
)
def test_a_cpu_has_a_worker_for_each_runner(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, runner: str, worker: str
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert (runner_here(), worker_here()) == (runner, worker)
    assert why(PLAIN) == why(PLAIN, worker_cls=worker) == why(PLAIN, use_ubatching=True) == []
    assert "worker_cls is" in why(PLAIN, worker_cls=GPU_WORKER)[0]


def test_other_platforms_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    (reason,) = why(PLAIN, worker_cls="mine.Worker")
    assert "CPU and CUDA platforms" in reason
