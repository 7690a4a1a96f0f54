"""Which cores the ranks of tensor parallelism get, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from support.pairs import Pair, make_pair
from vllm_dflash.config.mode import Mode

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
    """vLLM would fail in its own process, without naming the variable."""
    from vllm.utils import cpu_resource_utils

    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0])
    monkeypatch.delenv(BINDING, raising=False)
    args = engine_args(pair, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=rf"{BINDING}='\d.*\|\d.*' to divide .* {BINDING}=nobind"):
        args.create_engine_config()
    monkeypatch.setenv(BINDING, "0")
    with pytest.raises(ValueError, match="'0' has cores for 1"):
        engine_args(pair, tensor_parallel_size=2).create_engine_config()
    monkeypatch.setenv(BINDING, "0|1")
    config = engine_args(pair, tensor_parallel_size=2).create_engine_config()
    assert Mode.of(config).drafter_ranks == 2
    monkeypatch.setattr(cpu_resource_utils, "get_visible_memory_node", lambda: [0, 1])
    monkeypatch.delenv(BINDING)
    engine_args(pair, tensor_parallel_size=2).create_engine_config()
