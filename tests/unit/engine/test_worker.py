"""What a worker adds to the end of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_dflash.engine.worker import DFlashGPUWorker


def test_a_step_whose_first_half_failed_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for tokens all the same, gets None, and then says what the failure was."""
    monkeypatch.setattr(Worker, "sample_tokens", lambda self, grammar_output: None)
    worker: Any = object.__new__(DFlashGPUWorker)
    worker.use_v2_model_runner = True
    worker._costs_to_send = "sent with the first output"
    assert worker.sample_tokens(None) is None
    assert worker._costs_to_send is not None


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_runner_that_built_another_drafter_is_refused(runner: str) -> None:
    worker: Any = object.__new__(DFlashGPUWorker)
    worker.model_runner = SimpleNamespace(drafter=SimpleNamespace(), speculator=SimpleNamespace())
    with pytest.raises(RuntimeError, match="SimpleNamespace as its drafter"):
        getattr(worker, f"_attach_to_{runner}")()
