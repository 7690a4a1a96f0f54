"""What a worker adds to the end of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_worker import Worker

from vllm_dflash.engine.worker import DFlashCPUWorker, DFlashGPUWorker


def test_a_step_whose_first_half_failed_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for tokens all the same, gets None, and then says what the failure was."""
    monkeypatch.setattr(Worker, "sample_tokens", lambda self, grammar_output: None)
    worker: Any = object.__new__(DFlashGPUWorker)
    worker.use_v2_model_runner = True
    worker._costs_to_send = "sent with the first output"
    assert worker.sample_tokens(None) is None
    assert worker._costs_to_send is not None


def test_blocks_that_a_preempted_request_once_had_are_not_dropped() -> None:
    """Somebody else may have them by now, whose context waits for them."""
    worker: Any = object.__new__(DFlashCPUWorker)
    dropped: list[int] = []
    worker.use_v2_model_runner = False
    worker._num_blocks, worker._draft_groups = 8, [(0, 32, [])]
    worker.cache_config = SimpleNamespace(enable_prefix_caching=False)
    worker.drafter = SimpleNamespace(drop_context=lambda blocks, _: dropped.extend(blocks))
    ended = SimpleNamespace(block_ids=([5],), num_tokens=9)
    preempted = SimpleNamespace(block_ids=([6],), num_tokens=9)
    worker.model_runner = SimpleNamespace(
        requests={"ended": ended, "preempted": preempted},
        input_batch=SimpleNamespace(req_id_to_index={"ended": 0, "other": 1}),
    )
    worker._forget_blocks(
        SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            finished_req_ids={"ended", "preempted", "of another time"},
        )
    )
    assert dropped == [5]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_runner_that_built_another_drafter_is_refused(runner: str) -> None:
    worker: Any = object.__new__(DFlashGPUWorker)
    worker.model_runner = SimpleNamespace(drafter=SimpleNamespace(), speculator=SimpleNamespace())
    with pytest.raises(RuntimeError, match="SimpleNamespace as its drafter"):
        getattr(worker, f"_attach_to_{runner}")()
