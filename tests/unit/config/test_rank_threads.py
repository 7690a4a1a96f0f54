"""Which cores the ranks of tensor parallelism get, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from support.pairs import Pair, make_pair
from vllm_dflash.config.options import DFlashOptions
from vllm_dflash.config.thread_binding import Core, binding_fault, divide_cores

BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def engine_args(pair: Pair, **changes: Any) -> EngineArgs:
    config = {"method": "dflash", "model": str(pair.drafter)}
    return EngineArgs(
        model=str(pair.target),
        skip_tokenizer_init=True,
        max_model_len=256,
        speculative_config=config,
        **changes,
    )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return make_pair(tmp_path)


def test_threads_that_cannot_be_bound(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would say so in a process of its own, and not name the variable."""
    from vllm.utils import cpu_resource_utils

    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.delenv(BINDING, raising=False)
    args = engine_args(pair, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=rf"{BINDING}='\d.*\|\d.*' to share .* {BINDING}=nobind"):
        args.create_engine_config()
    monkeypatch.setenv(BINDING, "0|1|2")
    with pytest.raises(ValueError, match=r"'0\|1\|2' has cores for 3"):
        engine_args(pair, tensor_parallel_size=2).create_engine_config()
    monkeypatch.setenv(BINDING, "0|1")
    config = engine_args(pair, tensor_parallel_size=2).create_engine_config()
    assert DFlashOptions.of(config).drafter_ranks == 2
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0, 1])
    monkeypatch.delenv(BINDING)
    engine_args(pair, tensor_parallel_size=2).create_engine_config()


def test_cores_are_shared_out() -> None:
    """No two ranks get threads of one core: 8 logical CPUs, numbered as Linux does, are 4 cores."""
    cores = [Core(cpu, cpu % 4, 0) for cpu in range(8)]
    assert divide_cores(cores, 2) == "0-1|2-3"
    assert divide_cores([Core(cpu, cpu, 0) for cpu in (0, 1, 2, 5, 7)], 2) == "0-1|2,5,7"
    assert divide_cores(cores[:1], 2) is None
    assert binding_fault("auto", 2, 2, cores) is None
    assert binding_fault("nobind", 4, 1, cores) is None
    assert binding_fault("0-3", 1, 1, cores) is None
    assert "asks for 1 ranks" in (binding_fault("0|1", 1, 1, cores) or "")
    assert "here are 1. Set VLLM_CPU_OMP_THREADS_BIND='0-1|2-3'" in (
        binding_fault("auto", 2, 1, cores) or ""
    )
    assert (binding_fault("auto", 2, 1, cores[:1]) or "").endswith(
        "here are 1. Set VLLM_CPU_OMP_THREADS_BIND=nobind to leave threads unbound."
    )
