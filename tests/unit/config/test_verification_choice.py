"""On CUDA: which of vLLM's settings lets draft lengths vary under its graphs."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_dflash.config.class_paths import CPU_WORKER, GPU_WORKER
from vllm_dflash.config.engine_settings import choose_verification, choose_worker, length_table


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)


def choice(
    draft_length: str = "adaptive",
    *,
    eager: bool = False,
    mode: CUDAGraphMode | None = None,
    asynchronous: bool | None = None,
    **written: Any,
) -> dict[str, Any]:
    compilation = SimpleNamespace(**({} if mode is None else {"cudagraph_mode": mode}))
    args = SimpleNamespace(
        speculative_config=written,
        enforce_eager=eager,
        compilation_config=compilation,
        async_scheduling=asynchronous,
    )
    options = SimpleNamespace(draft_length=draft_length, num_speculative_tokens=7)
    return choose_verification(args, options)  # type: ignore[arg-type]


ADAPTIVE = {"enable_adaptive_verification": True}
TABLE = {"num_speculative_tokens_per_batch_size": length_table(7)}


@pytest.mark.usefixtures("_cuda")
def test_adaptive_verification_is_turned_on_where_it_holds() -> None:
    assert choice() == ADAPTIVE
    assert choice(mode=CUDAGraphMode.FULL_AND_PIECEWISE) == ADAPTIVE
    assert choice("fixed") == {}


@pytest.mark.usefixtures("_cuda")
def test_not_without_full_graphs() -> None:
    assert choice(eager=True) == {}
    assert choice(mode=CUDAGraphMode.PIECEWISE) == {}


@pytest.mark.usefixtures("_cuda")
def test_not_under_synchronous_scheduling_where_our_planner_does_it() -> None:
    assert choice(asynchronous=False) == {}


@pytest.mark.usefixtures("_cuda")
def test_the_users_word_counts() -> None:
    assert choice(enable_adaptive_verification=True) == {}  # it is set already
    assert choice(enable_adaptive_verification=False) == TABLE
    dashed: dict[str, Any] = {"enable-adaptive-verification": False}
    assert choice(**dashed) == TABLE


def test_nothing_on_a_cpu() -> None:
    assert choice() == {}


@pytest.mark.parametrize("max_draft", [1, 2, 3, 7, 15])
def test_the_table_names_the_lengths_to_capture(max_draft: int) -> None:
    """As vLLM reads it: 0 and K are always among them."""
    lookup = build_dynamic_sd_schedule_lookup(
        length_table(max_draft), vllm_max_batch_size=64, vllm_num_speculative_tokens=max_draft
    )
    assert {0, max_draft} <= set(lookup[1:])
    assert len(set(lookup[1:])) <= 4


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
