"""What `parity` adds to workers: vLLM refuses names that they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from parity.recorder import RECORDED, RecordedDrafting
from vllm_dflash.engine.v1.v1_worker import V1CPUWorker
from vllm_dflash.engine.v2.v2_cpu_worker import V2CPUWorker
from vllm_dflash.engine.v2.v2_workers import V2GPUWorker


@pytest.mark.parametrize("worker", [V1CPUWorker, V2CPUWorker, V2GPUWorker])
def test_nothing_of_a_worker_is_replaced(worker: type) -> None:
    extension = resolve_obj_by_qualname(RECORDED)
    added = {one for one in dir(extension) if not one.startswith("__")}
    assert added
    assert not [one for one in added if hasattr(worker, one)]


@pytest.mark.parametrize(("eager", "requests"), [(False, 1), (True, 2)])
def test_what_cannot_be_recorded(eager: bool, requests: int) -> None:
    worker = RecordedDrafting()
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=eager),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )
    with pytest.raises(ValueError, match="needs enforce_eager=True and max_num_seqs=1"):
        worker.record_drafting()
