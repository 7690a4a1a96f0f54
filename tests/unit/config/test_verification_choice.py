"""On CUDA: which of vLLM's settings lets draft lengths vary under its graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_dflash.config.class_paths import CPU_WORKER, GPU_WORKER
from vllm_dflash.config.engine_settings import choose_verification, choose_worker, length_table


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def choice(draft_length: str = "adaptive") -> dict[str, Any]:
    options = SimpleNamespace(draft_length=draft_length, draft_width=7, num_speculative_tokens=32)
    return choose_verification(options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_cuda")
def test_graphs_for_a_few_lengths_where_a_scheduler_chooses_among_them() -> None:
    table = {"num_speculative_tokens_per_batch_size": length_table(7)}
    assert choice() == table
    assert choice("fixed") == {}


def test_nothing_on_a_cpu() -> None:
    assert choice() == {}


@pytest.mark.parametrize("max_draft", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("max_requests", [1, 2, 3, 4, 64, 1024])
def test_the_table_names_the_lengths_to_capture(max_draft: int, max_requests: int) -> None:
    """As vLLM reads it: K is always among them, 0 wherever two fit, and K has most sizes."""
    lookup = build_dynamic_sd_schedule_lookup(
        length_table(max_draft),
        vllm_max_batch_size=max_requests,
        vllm_num_speculative_tokens=max_draft,
    )
    few = {entry[2] for entry in length_table(max_draft)}
    lengths = lookup[1:]
    assert {max_draft, 0} <= set(lengths) <= few if max_requests > 1 else lengths == [max_draft]
    if max_requests > 4:
        assert set(lengths) == few
        assert lengths[-1] == max_draft


@pytest.mark.usefixtures("_cuda")
def test_cuda_gets_its_own_worker() -> None:
    assert choose_worker("auto") == choose_worker(GPU_WORKER) == GPU_WORKER
    with pytest.raises(ValueError, match="worker_cls is"):
        choose_worker(CPU_WORKER)


def test_a_cpu_gets_its_own_worker() -> None:
    assert choose_worker("auto") == choose_worker(CPU_WORKER) == CPU_WORKER


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    with pytest.raises(ValueError, match="CPU and CUDA platforms"):
        choose_worker("auto")


def test_a_worker_of_someone_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"worker_cls is 'mine\.Worker'"):
        choose_worker("mine.Worker")
