"""Gated delta nets on CPUs: the output of a request's rows does not depend on what was drafted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from vllm_dflash.engine.v1.v1_fixes.short_draft_states import _of_whole_drafts, forward_drafts

K, WIDTH, HEADS, SIZE = 7, 4, 2, 128
CHANNELS = 3 * HEADS * SIZE
LENGTH = WIDTH - 1 + K


@pytest.fixture(scope="module")
def layer() -> Any:
    """As much of a layer as its core needs."""
    torch.manual_seed(0)

    def rearrange(mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = mixed.split(HEADS * SIZE, dim=-1)
        return tuple(part.reshape(1, -1, HEADS, SIZE).contiguous() for part in parts)

    weight = torch.randn(CHANNELS, 1, WIDTH).bfloat16()
    return SimpleNamespace(
        conv1d=SimpleNamespace(weight=weight, bias=None, _cpu_unpacked_conv_weight=weight[:, 0]),
        activation="silu",
        A_log=torch.randn(HEADS),
        dt_bias=torch.randn(HEADS).bfloat16(),
        rearrange_mixed_qkv=rearrange,
    )


def run(layer: Any, steps: list[list[tuple[int, int]]], forward: Any = forward_drafts) -> Any:
    """Output of each request's rows. `steps` gives the right and wrong rows of every request; the
    order of requests differs in each step."""
    torch.manual_seed(1)
    count = len(steps[0])
    total = [sum(right for right, _ in request) for request in zip(*steps, strict=True)]
    rows = [torch.randn(size, CHANNELS + 2 * HEADS).bfloat16() for size in total]
    slots = torch.arange(count * (K + 1), dtype=torch.int32).view(count, -1) + 1
    histories = torch.zeros(slots.numel() + 1, CHANNELS, LENGTH).bfloat16()
    states = torch.zeros(slots.numel() + 1, HEADS, SIZE, SIZE)
    accepted, done = torch.ones(count, dtype=torch.int32), [0] * count
    out: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for number, step in enumerate(steps):
        order = [(place + number) % count for place in range(count)]
        batch = [
            torch.cat([rows[n][done[n] :][: step[n][0]], torch.randn(step[n][1], rows[n].shape[1])])
            for n in order
        ]
        sizes = torch.tensor([0, *(len(part) for part in batch)])
        metadata = SimpleNamespace(
            num_spec_decodes=count,
            spec_query_start_loc=sizes.cumsum(0).int(),
            spec_state_indices_tensor=slots[order],
            num_accepted_tokens=accepted[order],
        )
        qkv, b, a = torch.cat(batch).bfloat16().split([CHANNELS, HEADS, HEADS], dim=-1)
        inputs = (part.contiguous() for part in (qkv, b, a))
        found = forward(layer, metadata, *inputs, histories, states, WIDTH, LENGTH)
        for n, part in zip(order, found.split([len(one) for one in batch]), strict=True):
            accepted[n] = right = step[n][0]
            out[n].append(part[:right])
            done[n] += right
    return [torch.cat(part) for part in out]


RAGGED = [
    [(3, 5), (1, 0), (4, 0), (1, 3)],
    [(1, 1), (2, 2), (4, 0), (8, 0)],
    [(2, 0), (8, 0), (4, 0), (1, 0)],
    [(8, 0), (1, 7), (3, 0), (5, 2)],
    [(2, 3), (4, 1), (1, 0), (1, 0)],
]
ONE_BY_ONE = [[(1, 0)] * 4] * 16


def test_drafts_of_any_length_leave_the_state_of_what_was_accepted(layer: Any) -> None:
    for drafted, plain in zip(run(layer, RAGGED), run(layer, ONE_BY_ONE), strict=True):
        torch.testing.assert_close(drafted, plain, rtol=0, atol=1e-2)


def test_whole_drafts_go_through_vllms_own_function(layer: Any) -> None:
    """It is faster on some machines, and right for whole drafts."""
    assert gdn_attention._spec_forward in (_of_whole_drafts, forward_drafts)
    whole = [[(3, 5), (1, 7)], [(8, 0), (5, 3)], [(5, 3), (8, 0)], [(1, 7), (3, 5)]]
    plain = run(layer, [[(1, 0), (1, 0)]] * 17)
    for drafted, rows in zip(run(layer, whole, _of_whole_drafts), plain, strict=True):
        torch.testing.assert_close(drafted, rows, rtol=0, atol=1e-2)
