"""Attention layers in steps with draft trees: which kernels run, and what comes out of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.tree_rows import UNTOUCHED, Case, Made, Request, make
from vllm_dflash.engine.v2.trees.tree_attention import attend_to_trees, attention_unsupported_reason
from vllm_dflash.engine.v2.trees.tree_kernels import MOST_ROWS

pytestmark = pytest.mark.v2
CASES = {
    "trees and a chain": Case([Request(40, 9), Request(0, 3, has_tree=False), Request(17, 1)]),
    "a longer chain": Case([Request(9, 6), Request(33, 30, has_tree=False)], most_nodes=8),
    "window": Case([Request(40, 9), Request(70, 5)], window=24),
    "sinks, soft cap": Case([Request(40, 9), Request(7, 0)], sinks=True, softcap=15.0),
    "beside a prompt": Case([Request(40, 9), Request(30, 99, has_tree=False), Request(2, 4)]),
}


def causal(case: Case) -> torch.Tensor:
    """Rows that vLLM's forward returns: to it, all requests are chains."""
    chains = [each._replace(has_tree=False) for each in case.requests]
    return make(replace(case, requests=chains)).expected


class Layer:
    """A layer whose implementation counts calls of vLLM's `forward`."""

    def __init__(self, made: Made, case: Case) -> None:
        scores = made.scores
        self.calls = 0
        self.impl = SimpleNamespace(
            scale=scores.scale,
            sliding_window=(scores.window - 1, 0 if scores.window else -1),
            logits_soft_cap=scores.softcap,
            sinks=scores.sinks,
            kv_cache_dtype="auto",
            alibi_slopes=None,
            attn_type="decoder",
            forward=self.plain,
        )
        self.rows = causal(case)

    def plain(self, layer: Any, *arguments: Any, **_: Any) -> torch.Tensor:
        output = arguments[5]
        output[:] = self.rows
        self.calls += 1
        return output

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "TRITON_ATTN")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_of_trees_see_their_ancestors(case: Case) -> None:
    made = make(case)
    layer = Layer(made, case)
    attend_to_trees([layer], made.trees)
    output = torch.full_like(made.query, UNTOUCHED)
    layer.impl.forward(layer, made.query, None, None, made.kv_cache, made.batch, output)
    torch.testing.assert_close(output, made.expected, rtol=2e-5, atol=2e-5)
    assert layer.calls == (made.batch.max_query_len > MOST_ROWS)


def test_without_drafts_nothing_is_different() -> None:
    case = CASES["trees and a chain"]
    made = make(case)
    layer = Layer(made, case)
    attend_to_trees([layer], made.trees)
    output = torch.empty_like(made.query)
    for batch in (None, replace(made.batch, max_query_len=1)):
        layer.impl.forward(layer, made.query, None, None, made.kv_cache, batch, output)
        assert torch.equal(output, layer.rows)
    assert layer.calls == 2


def test_chains_are_what_vllms_kernel_makes_of_them() -> None:
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    case = Case([Request(40, 9, has_tree=False), Request(3, 2, has_tree=False)], window=24)
    made = make(case)
    impl = TritonAttentionImpl(4, 32, 0.3, 2, None, 24, "auto")
    layer = SimpleNamespace(impl=impl, _k_scale=torch.ones(()), _v_scale=torch.ones(()))
    nothing = dict.fromkeys(
        (
            "seq_threshold_3D",
            "num_par_softmax_segments",
            "softmax_segm_output",
            "softmax_segm_max",
            "softmax_segm_expsum",
            "mm_prefix_range_tensor",
            "rswa_prefix_lens",
            "rswa_window",
        )
    )
    metadata = SimpleNamespace(**vars(made.batch), causal=True, **nothing)
    vllms = impl.forward
    attend_to_trees([layer], made.trees)
    outputs = []
    for forward in (vllms, impl.forward):
        output = torch.full_like(made.query, UNTOUCHED)
        forward(layer, made.query, None, None, made.kv_cache, metadata, output)
        outputs.append(output)
    torch.testing.assert_close(*outputs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("of_layer", "why"),
    [
        ({}, None),
        ({"kv_cache_dtype": "fp8"}, "quantised"),
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"attn_type": "encoder_decoder"}, "encoder"),
        ({"chunk_lookback": 0}, "chunks"),
        ({"backend": "CPU_ATTN"}, "CPU_ATTN cannot"),
        ({"backend": "FLASH_ATTN_MLA"}, "FLASH_ATTN_MLA cannot"),
    ],
)
def test_layers_that_are_refused(of_layer: dict[str, Any], why: str | None) -> None:
    case = CASES["window"]
    layer: Any = Layer(make(case), case)
    if "backend" in of_layer:
        name = of_layer.pop("backend")
        layer.get_attn_backend = lambda: SimpleNamespace(get_name=lambda: name)
    vars(layer.impl).update(of_layer)
    found = attention_unsupported_reason({"model.layers.0": layer})
    assert (found is None) if why is None else why in str(found)
