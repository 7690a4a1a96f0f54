"""Kernels that attend to draft trees, against plain attention; in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.tree_rows import Case, Request, attend, make
from vllm_dflash.engine.v2.trees import tree_kernels
from vllm_dflash.engine.v2.trees.tree_context import attend_to_context, num_segments
from vllm_dflash.engine.v2.trees.tree_kernels import Launch
from vllm_dflash.engine.v2.trees.tree_nodes import attend_to_nodes

pytestmark = pytest.mark.v2

REQUESTS = st.builds(
    Request,
    st.integers(0, 200) | st.integers(0, 4096),
    st.integers(0, 10) | st.integers(0, 64),
    st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Batches and layers of all kinds. A prompt beside trees may have more rows than any tree."""
    requests = draw(st.lists(REQUESTS, min_size=1, max_size=3))
    all_requests = draw(st.booleans())
    if not all_requests and draw(st.booleans()):
        requests.append(Request(draw(st.integers(0, 30)), 90, has_tree=False))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 8)]))
    return Case(
        requests,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_size=draw(st.sampled_from([64, 80, 128, 256, 512])),
        window=draw(st.just(0) | st.integers(1, 100) | st.integers(1, 3000)),
        softcap=draw(st.sampled_from([0.0, 15.0])),
        sinks=draw(st.booleans()),
        segments=draw(st.integers(1, 16)),
        all_requests=all_requests,
    )


@settings(max_examples=40)
@given(cases(), st.integers(0, 3))
@example(Case([Request(37, 8)]), 0)
@example(Case([Request(0, 64), Request(15, 64, has_tree=False)], heads=2, window=3), 1)
@example(Case([Request(4096, 5)], heads=8, kv_heads=1, head_size=64, segments=16), 2)
def test_rows_see_the_context_and_their_ancestors(case: Case, seed: int) -> None:
    output, expected = attend(case, seed)
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("tiles", "expected"), [(1, 16), (24, 11), (264, 1), (2000, 1)])
def test_contexts_are_split_as_far_as_programs_are_idle(tiles: int, expected: int) -> None:
    assert num_segments(tiles, 264) == expected


def test_a_prompts_rows_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts beside a prompt are split as without it, and the parts have none of its rows."""
    case = Case([Request(60, 7), Request(30, 190, has_tree=False), Request(20, 5)], most_nodes=7)
    case.all_requests = False
    made = make(case)
    with monkeypatch.context() as patch:
        patch.setattr(tree_kernels, "_num_programs", lambda device: 160)
        launch = Launch.from_batch(
            made.query, made.kv_cache, made.batch, made.trees, made.scores, all_requests=False
        )
    assert num_segments(launch.num_tiles, launch.num_programs) == 16
    assert launch.num_rows == launch.rows_per_request * len(made.batch.seq_lens) == 8 * 5
    output, expected = attend(case)
    torch.testing.assert_close(output, expected, rtol=2e-5, atol=2e-5)


def test_sequences_shorter_than_their_rows_reach_no_block_before_the_table() -> None:
    """While graphs are captured, vLLM's Triton backend says that each sequence has one token."""
    case = Case([Request(0, 9), Request(0, 15)])
    made = make(case)
    made.batch.seq_lens.fill_(1)
    # There is a block number before the table, and NaN before the cache.
    cache = torch.cat([torch.full_like(made.kv_cache[:1], torch.nan), made.kv_cache.nan_to_num()])
    table = torch.zeros_like(torch.cat([made.batch.block_table[:1], made.batch.block_table]))
    made.kv_cache, made.batch.block_table = cache[1:], table[1:]
    cache[2:] = torch.nan
    table[0] = 1
    output = torch.zeros_like(made.query)
    layer = made.batch, made.trees, made.scores
    context = attend_to_context(made.query, made.kv_cache, *layer, all_requests=True)
    attend_to_nodes(made.query, made.kv_cache, context, output, *layer, all_requests=True)
    assert output.isfinite().all()
