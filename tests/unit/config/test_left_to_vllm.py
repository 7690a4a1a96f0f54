"""Reasons that leave an engine to vLLM, where no config of this vLLM here has them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from support.who_runs import Settings
from vllm_dflash.config.engine_options import CPU_WORKER_V1, CPU_WORKER_V2, worker_here
from vllm_dflash.config.left_to_vllm import (
    architecture_of_vllm,
    config_of_drafter,
    unsupported_reasons,
)

PLAIN: Settings = {"architectures": ["DFlashDraftModel"]}
PROBABILISTIC, FIXED = {"draft_sample_method": "probabilistic"}, {"draft_length": "fixed"}
TWO_RANKS: Settings = {"tensor_parallel_size": 2}
LAUNCHED: Settings = {**TWO_RANKS, "distributed_executor_backend": "external_launcher"}
MARKED: Settings = {"has_watermark": True}
NOT_HERE: list[tuple[str, str, Settings, Settings]] = [
    # Words of the reason, runner, settings of the speculative config, and of the engine.
    ("a watermark needs", "v1", PROBABILISTIC, MARKED),
    ("", "v1", {"draft_sample_method": "greedy"}, MARKED),  # no vLLM starts it
    ("", "v1", PROBABILISTIC, {}),
    ("", "v2", PROBABILISTIC, {}),
    ("rejection_sample_method is 'fly'", "v1", {"rejection_sample_method": "fly"}, {}),
    ("external_launcher", "v2", {}, LAUNCHED),
    ("", "v2", FIXED, LAUNCHED),
    ("", "v2", {**FIXED, "draft_window": 256}, LAUNCHED),
    ("", "v2", {}, {**LAUNCHED, "tensor_parallel_size": 1}),
    ("", "v1", {}, LAUNCHED),  # its ranks use the first rank's times
    ("", "v2", {}, TWO_RANKS),
    ("", "v1", {}, {"use_ubatching": True}),
]


def reasons(
    config: Settings,
    asked: Settings | None = None,
    *,
    has_watermark: bool = False,
    **changes: Any,
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
    return unsupported_reasons(requested, config, target, parallel, has_watermark=has_watermark)


@pytest.mark.parametrize(("words", "on", "asked", "settings"), NOT_HERE, ids=str)
def test_settings_that_no_vllm_has_here(
    monkeypatch: pytest.MonkeyPatch, words: str, on: str, asked: Settings, settings: Settings
) -> None:
    """In another version of vLLM, or if it is started in another way."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", on == "v2")
    found = reasons(PLAIN, asked, **settings)
    assert [words in reason for reason in found] == [True] * bool(words)


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (["DFlashDraftModel"], None),
        (["DFlash2DraftModel", "DFlashDraftModel"], None),
        (["LiLiCorrDraftModel"], None),
        (["2DraftModel"], None),  # known only with DFlash before its name
        (["DraftModel"], None),
        ([], None),
        (["DFlash2DraftModel", 3], None),
        (None, None),
        (["Qwen3XPressModel"], "DFlashQwen3XPressModel"),  # vLLM 0.33 runs these two
        (["DFlash2BeamDraftModel"], "DFlash2BeamDraftModel"),
    ],
)
@pytest.mark.parametrize("kind", [None, "dflash", "eagle3", "dspark"])
def test_architectures(
    monkeypatch: pytest.MonkeyPatch, config: Any, architecture: str | None, kind: str | None
) -> None:
    """`speculators_model_type` counts alone. vLLM 0.33's registry has each architecture under its
    own name and under a DFlash drafter's."""
    for name in ("Qwen3XPressModel", "DFlashQwen3XPressModel", "DFlash2BeamDraftModel"):
        monkeypatch.setitem(ModelRegistry.models, name, ModelRegistry.models["DFlashDraftModel"])
    of_kind = {None: architecture, "dspark": "Qwen3DSparkModel"}.get(kind)
    written = {"architectures": config, "speculators_model_type": kind}
    assert architecture_of_vllm(written) == of_kind


@pytest.mark.parametrize("asked", [{"model": None}, {"model": ""}, {"model": 3}, {}])
def test_without_a_drafter_there_is_no_config(asked: Settings) -> None:
    """A missing model is reported later, with the settings as a whole."""
    assert config_of_drafter({"method": "dflash", **asked}) == {}
    assert reasons({}, asked) == []


def test_a_drafter_that_is_redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_MODEL_REDIRECT_PATH maps names to folders; vLLM applies it to drafters as well."""
    (tmp_path / "config.json").write_text('{"architectures": ["LagunaForCausalLM"]}')
    redirect = {"some/drafter": str(tmp_path)}.get
    monkeypatch.setattr("vllm.transformers_utils.utils.maybe_model_redirect", redirect)
    assert config_of_drafter({"model": "some/drafter"})["architectures"] == ["LagunaForCausalLM"]


@pytest.mark.parametrize(
    ("is_v2", "has_triton", "worker"),
    [
        (None, False, CPU_WORKER_V1),
        (None, True, CPU_WORKER_V2),  # also on a CPU: vLLM's own choice
        (False, True, CPU_WORKER_V1),
        (True, False, CPU_WORKER_V2),
    ],
)
def test_each_runner_has_a_worker_on_cpus(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, worker: str
) -> None:
    """`test_who_runs.py` has GPUs."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert worker_here() == worker
    assert reasons(PLAIN) == reasons(PLAIN, worker_cls=worker) == []
    assert "worker_cls is" in reasons(PLAIN, worker_cls="mine.Worker")[0]


def test_other_platforms_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(type(current_platform), f"is_{kind}", lambda _: False)
    (reason,) = reasons(PLAIN, worker_cls="mine.Worker")
    assert "CPU and CUDA platforms" in reason
