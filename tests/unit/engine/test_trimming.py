"""When vLLM's adaptive verification is possible, and which draft lengths there are without it.

For what backends cannot do, tests/engine/test_selection_matrix.py asks vLLM itself.
"""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.config import CUDAGraphMode

from vllm_dflash.engine.v2.trimming import groups_of, lengths_to_choose, obstacle

IS_032 = vllm.__version__.startswith("0.32")
Graph = namedtuple("Graph", "uniform_token_count")


def obstacle_beside(
    mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, *, lora: Any = None, **settings: Any
) -> str | None:
    """Return why it is not possible in an engine whose backends are all able to."""
    whole: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(**settings),
        aux_output_config=SimpleNamespace(**settings),
        parallel_config=SimpleNamespace(**settings),
        speculative_config=SimpleNamespace(
            enable_adaptive_verification=False, num_speculative_tokens=7, parallel_drafting=True
        ),
        lora_config=lora,
        use_v2_model_runner=True,
    )
    return obstacle(whole, {}, {}, max_query_len=8)


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_without_full_graphs(mode: CUDAGraphMode) -> None:
    assert obstacle_beside(mode) == "full CUDA graphs are off"


@pytest.mark.parametrize(
    ("setting", "is_refused"),
    [
        ("enable_return_routed_experts", True),
        ("return_sampling_mask", True),
        ("enable_batch_sharded_sampling", IS_032),
    ],
)
def test_beside_settings_that_vllm_refuses_with_it(setting: str, is_refused: bool) -> None:
    found = obstacle_beside(**{setting: True})
    assert found == (f"{setting} is on" if is_refused else None)
    assert obstacle_beside(**{setting: False}) is None


def test_beside_lora_whose_rows_the_host_tells() -> None:
    assert obstacle_beside(lora=object()) == "LoRA is on"


def test_layers_that_share_anothers_cache_are_not_asked() -> None:
    shares: Any = SimpleNamespace(get_kv_cache_spec=lambda _: None)
    assert [*groups_of(None, {"it": shares})] == []


def test_the_scheduler_chooses_among_lengths_that_have_graphs() -> None:
    for captured, lengths in (
        ([1, 3, 5, 8, None], [0, 2, 4, 7]),
        ([3], [0, 2, 7]),
        ([3, 16], [0, 2, 7, 15]),  # a tree has 15 nodes
    ):
        graphs = {Graph(count): None for count in captured}
        runner: Any = SimpleNamespace(
            adaptive_verification=None, cudagraph_manager=SimpleNamespace(graphs=graphs)
        )
        assert lengths_to_choose(runner, 7) == lengths
