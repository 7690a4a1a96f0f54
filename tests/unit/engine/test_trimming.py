"""When vLLM's adaptive verification is possible, by vLLM's own functions and fake backends."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_dflash.engine.v2.trimming import lengths_to_choose, obstacle

ALWAYS, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
SINGLE, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER
IS_032 = vllm.__version__.startswith("0.32")
Graph = namedtuple("Graph", "uniform_token_count")


def config(mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE, **settings: Any) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        model_config=SimpleNamespace(**settings),
        aux_output_config=SimpleNamespace(**settings),
        parallel_config=SimpleNamespace(**settings),
        speculative_config=SimpleNamespace(
            enable_adaptive_verification=False, num_speculative_tokens=7, parallel_drafting=True
        ),
        lora_config=None,
        use_v2_model_runner=True,
    )


def layer(
    support: AttentionCGSupport = ALWAYS,
    *,
    exact: bool = False,
    bound: int | None = None,
    has_cache: bool = True,
) -> Any:
    """A layer with a backend of its own.

    Args:
        support: CUDA graph support of its metadata builder, once the setting is on.
        exact: whether it must know on the host how many rows each request has.
        bound: widest ragged batch that it claims to replay.
        has_cache: whether it has a cache of its own, rather than another layer's.
    """

    class Builder:
        @classmethod
        def get_cudagraph_support(cls, config: Any, spec: Any) -> AttentionCGSupport:
            return support if config.speculative_config.enable_adaptive_verification else NEVER

        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, config: Any, spec: Any) -> int | None:
            return bound

    class Backend:
        @staticmethod
        def get_name() -> str:
            return "SOME_BACKEND"

        @staticmethod
        def get_builder_cls() -> type[Builder]:
            return Builder

        @staticmethod
        def supports_device_cpu_query_lens_mismatch() -> bool:
            return not exact

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    return SimpleNamespace(
        get_attn_backend=lambda: Backend,
        get_kv_cache_spec=lambda _: spec if has_cache else None,
    )


def asked(target: list[Any], drafter: list[Any], **settings: Any) -> str | None:
    whole = config(**settings)
    why = obstacle(
        whole,
        {f"target.{number}": one for number, one in enumerate(target)},
        {f"drafter.{number}": one for number, one in enumerate(drafter)},
        max_query_len=8,
    )
    assert whole.speculative_config.enable_adaptive_verification is False
    return why


def test_where_every_layer_can() -> None:
    assert asked([layer(), layer()], [layer()]) is None
    assert asked([layer(UNIFORM, bound=8)], [layer(UNIFORM)]) is None
    assert asked([layer(), layer(NEVER, has_cache=False)], [layer()]) is None


@pytest.mark.parametrize(
    ("target", "drafter", "why"),
    [
        ([layer(), layer(exact=True)], [layer()], "must know each request's rows on the host"),
        ([layer(), layer(UNIFORM)], [layer()], "no CUDA graphs for ragged batches"),
        ([layer(UNIFORM, bound=7)], [layer()], "no CUDA graphs for ragged batches"),
        # vLLM asks only the target, and would fail as soon as it finds no graph to measure.
        ([layer()], [layer(SINGLE)], "no full CUDA graphs for batches of drafts"),
        ([layer()], [layer(NEVER)], "no full CUDA graphs for batches of drafts"),
    ],
)
def test_a_layer_that_cannot(target: list[Any], drafter: list[Any], why: str) -> None:
    found = asked(target, drafter)
    assert found is not None
    assert why in found


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_without_full_graphs(mode: CUDAGraphMode) -> None:
    assert asked([layer()], [layer()], mode=mode) == "full CUDA graphs are off"


@pytest.mark.parametrize(
    ("setting", "is_refused"),
    [
        ("enable_return_routed_experts", True),
        ("return_sampling_mask", True),
        ("enable_batch_sharded_sampling", IS_032),
    ],
)
def test_beside_settings_that_vllm_refuses_with_it(setting: str, is_refused: bool) -> None:
    found = asked([layer()], [layer()], **{setting: True})
    assert found == (f"{setting} is on" if is_refused else None)
    assert asked([layer()], [layer()], **{setting: False}) is None


@pytest.mark.parametrize(
    ("backend", "trims"), [(Mamba2AttentionBackend, not IS_032), (GDNAttentionBackend, False)]
)
def test_layers_with_states(backend: Any, trims: bool) -> None:
    """vLLM's own backends. In 0.33, Mamba2's kernels use the row counts on the device."""
    spec = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    keeper = SimpleNamespace(get_attn_backend=lambda: backend, get_kv_cache_spec=lambda _: spec)
    found = asked([layer(), keeper], [layer()])
    assert found == (
        None if trims else f"{backend.__name__} must know each request's rows on the host"
    )


def test_beside_lora_whose_rows_the_host_tells() -> None:
    with_lora = config()
    with_lora.lora_config = object()
    assert obstacle(with_lora, {}, {}, 8) == "LoRA is on"


def runner(counts: list[int | None], *, trims: bool = False) -> Any:
    manager = SimpleNamespace(graphs={Graph(count): None for count in counts})
    return SimpleNamespace(
        num_speculative_steps=7,
        adaptive_verification=object() if trims else None,
        cudagraph_manager=manager,
    )


def test_the_scheduler_chooses_among_lengths_that_have_graphs() -> None:
    assert lengths_to_choose(runner([1, 3, 5, 8, None]), 7) == [0, 2, 4, 7]
    assert lengths_to_choose(runner([3]), 7) == [0, 2, 7]
    assert lengths_to_choose(runner([3, 16]), 7) == [0, 2, 7, 15]  # a tree has 15 nodes


def test_any_length_will_do_without_graphs_for_one() -> None:
    assert lengths_to_choose(runner([]), 7) == list(range(8))
    assert lengths_to_choose(runner([None]), 7) == list(range(8))
    alone = runner([])
    alone.cudagraph_manager = None
    assert lengths_to_choose(alone, 7) == list(range(8))


def test_all_or_nothing_where_the_device_trims() -> None:
    assert lengths_to_choose(runner([None], trims=True), 7) == [0, 7]
