"""What `bench` and `parity` give to workers: vLLM refuses what a worker has already."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dflash.engine.worker import DFlashCPUWorker, DFlashGPUWorker
from vllm_dflash.tools.bench.draft_time import TIMED, TimedDrafting
from vllm_dflash.tools.parity.engine_side import engine_arguments
from vllm_dflash.tools.parity.recorder import RECORDED, RecordedDrafting


@pytest.mark.parametrize("name", [TIMED, RECORDED])
@pytest.mark.parametrize("worker", [DFlashCPUWorker, DFlashGPUWorker])
def test_nothing_of_a_worker_is_replaced(name: str, worker: type) -> None:
    extension = resolve_obj_by_qualname(name)
    added = {one for one in dir(extension) if not one.startswith("__")}
    assert len(added) == 2
    assert not [one for one in added if hasattr(worker, one)]


def test_parity_asks_for_its_own() -> None:
    assert engine_arguments("d", "t", "float32", 64)["worker_extension_cls"] == RECORDED


@pytest.mark.parametrize(("eager", "requests"), [(False, 1), (True, 2)])
def test_what_cannot_be_recorded(eager: bool, requests: int) -> None:
    worker = RecordedDrafting()
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )
    with pytest.raises(ValueError, match="needs enforce_eager=True and max_num_seqs=1"):
        worker.record_drafting()


def test_draft_steps_are_counted_once_and_timed_in_all_parts() -> None:
    runner = SimpleNamespace(
        propose_draft_token_ids=lambda sampled: [sampled],
        _copy_draft_token_ids_to_cpu=lambda: None,
        take_draft_token_ids=lambda: [[5]],
    )
    worker = TimedDrafting()
    worker.model_runner = runner
    worker.time_drafting()
    for _ in range(3):
        assert runner.propose_draft_token_ids(sampled=7) == [7]
        assert runner.take_draft_token_ids() == [[5]]
    calls, seconds = worker.drafting_time()
    assert calls == 3
    assert 0 < seconds < 1
