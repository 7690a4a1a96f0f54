"""On what an engine runs: the runner, the worker, and platforms that are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_dflash.config.engine_settings import refuse
from vllm_dflash.config.mode import (
    CPU_WORKER,
    CPU_WORKER_V2,
    GPU_WORKER,
    runner_here,
    worker_here,
)


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def refuse_worker(worker_cls: str) -> None:
    args: Any = SimpleNamespace(enable_lora=False, watermark_config=None)
    parallel: Any = SimpleNamespace(
        worker_cls=worker_cls,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        distributed_executor_backend="uni",
    )
    refuse(args, parallel)


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("is_v2", [None, True, False])
def test_cuda_gets_its_own_worker(monkeypatch: pytest.MonkeyPatch, is_v2: bool | None) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    assert (runner_here(), worker_here()) == ("v2", GPU_WORKER)
    refuse_worker("auto")
    refuse_worker(GPU_WORKER)
    with pytest.raises(ValueError, match="worker_cls is"):
        refuse_worker(CPU_WORKER)


@pytest.mark.parametrize(
    ("is_v2", "has_triton", "runner", "worker"),
    [
        (None, False, "v1", CPU_WORKER),
        (None, True, "v2", CPU_WORKER_V2),  # of a CPU, too: then it is vLLM's choice
        (False, True, "v1", CPU_WORKER),
        (True, False, "v2", CPU_WORKER_V2),
    ],
)
def test_a_cpu_has_a_worker_for_each_runner(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool | None, has_triton: bool, runner: str, worker: str
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    assert (runner_here(), worker_here()) == (runner, worker)
    refuse_worker("auto")
    refuse_worker(worker)
    with pytest.raises(ValueError, match="worker_cls is"):
        refuse_worker(GPU_WORKER)


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(ValueError, match="CPU and CUDA platforms"):
        refuse_worker("auto")


def test_a_worker_of_someone_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls is 'mine\.Worker'"):
        refuse_worker("mine.Worker")


def test_every_reason_is_said_at_once() -> None:
    args: Any = SimpleNamespace(enable_lora=True, watermark_config=None)
    parallel: Any = SimpleNamespace(
        worker_cls="mine.Worker",
        pipeline_parallel_size=3,
        data_parallel_size=4,
        distributed_executor_backend="uni",
    )
    with pytest.raises(ValueError, match="worker_cls") as refused:
        refuse(args, parallel)
    said = str(refused.value)
    assert "pipeline_parallel_size is 3" in said
    assert "data_parallel_size is 4" in said
    assert "does not support LoRA" in said
