"""What an engine runs on: the runner, the worker, and what is left to vLLM's own DFlash."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_dflash.config.left_to_vllm import why_left
from vllm_dflash.config.mode import (
    CPU_WORKER_V1,
    CPU_WORKER_V2,
    GPU_WORKER,
    runner_here,
    worker_here,
)


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def left(worker_cls: str = "auto", **parallel: Any) -> list[str]:
    """Return why an engine is left to vLLM."""
    target: Any = SimpleNamespace(
        model="target", is_moe=True, is_hybrid=False, is_multimodal_model=False
    )
    plain: dict[str, Any] = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "use_ubatching": False,
    }
    plain |= {"tensor_parallel_size": 1, "distributed_executor_backend": None}
    config = SimpleNamespace(worker_cls=worker_cls, **{**plain, **parallel})
    return why_left({"model": "it"}, {"architectures": []}, target, config)


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
        assert left(use_ubatching=splits) == []
        assert left(GPU_WORKER, use_ubatching=splits) == []
        assert "worker_cls is" in left(CPU_WORKER_V1, use_ubatching=splits)[0]
    else:
        (why,) = left(use_ubatching=splits)
        assert "this engine gets V1" in why
        assert ("--enable-dbo" in why) == (splits and is_v2 is None)


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
    assert left() == left(worker) == left(use_ubatching=True) == []
    assert "worker_cls is" in left(GPU_WORKER)[0]


def test_other_platforms_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    (why,) = left("mine.Worker")
    assert "CPU and CUDA platforms" in why
