"""On what an engine runs, and who decides there."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform

from vllm_dflash.config.class_paths import CPU_WORKER, CPU_WORKER_V2, GPU_WORKER
from vllm_dflash.config.mode import MOST_FREE_DRAFTS, Mode
from vllm_dflash.config.speculative_settings import SpeculativeSettings


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def mode(worker_cls: str = "auto", own: dict[str, Any] | None = None, **engine: Any) -> Mode:
    args = SimpleNamespace(**{"scheduler_cls": None, "max_num_batched_tokens": None, **engine})
    settings = SpeculativeSettings(model="drafter", **(own or {}))
    return Mode.of(args, SimpleNamespace(worker_cls=worker_cls), settings)


@pytest.mark.usefixtures("_cuda")
def test_graphs_for_a_few_lengths_where_a_scheduler_chooses_among_them() -> None:
    assert mode().captures_lengths
    assert not mode(own={"draft_length": "fixed"}).captures_lengths
    assert not mode(scheduler_cls="mine.Scheduler").captures_lengths


@pytest.mark.parametrize(
    ("is_v2", "own", "engine", "allowed"),
    [
        (None, {}, {}, True),
        (False, {}, {}, True),
        (True, {}, {}, False),
        (False, {}, {"scheduler_cls": "mine.Scheduler"}, False),
        (False, {}, {"max_num_batched_tokens": MOST_FREE_DRAFTS}, False),
        (False, {}, {"max_num_batched_tokens": MOST_FREE_DRAFTS + 1}, True),
    ],
)
def test_where_drafts_may_be_longer_than_blocks(
    monkeypatch: pytest.MonkeyPatch,
    is_v2: bool | None,
    own: dict[str, Any],
    engine: dict[str, Any],
    allowed: bool,
) -> None:
    """Somebody else's scheduler would keep as much room in any case."""
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    found = mode(own=own, **engine)
    assert found.runner == ("v2" if is_v2 else "v1")
    assert found.allows_long_drafts is allowed
    assert not found.captures_lengths  # on a CPU there are no graphs


@pytest.mark.usefixtures("_cuda")
@pytest.mark.parametrize("is_v2", [None, True, False])
def test_cuda_gets_its_own_worker(monkeypatch: pytest.MonkeyPatch, is_v2: bool | None) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    assert mode().worker == mode(GPU_WORKER).worker == GPU_WORKER
    assert mode().runner == "v2"
    with pytest.raises(ValueError, match="worker_cls is"):
        mode(CPU_WORKER)


@pytest.mark.parametrize(("is_v2", "worker"), [(False, CPU_WORKER), (True, CPU_WORKER_V2)])
def test_a_cpu_has_a_worker_for_each_runner(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool, worker: str
) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_USE_V2_MODEL_RUNNER", is_v2)
    assert mode().worker == mode(worker).worker == worker


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(ValueError, match="CPU and CUDA platforms"):
        mode()


def test_a_worker_of_someone_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls is 'mine\.Worker'"):
        mode("mine.Worker")
