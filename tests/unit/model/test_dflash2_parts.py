"""DFlash 2's parts beside NaN, and the reference's against vLLM's own."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.models.qwen3_dflash2 import _grouped_conv, _score_edges

from reference.reference_dflash2 import ReferenceConvolution, ReferenceSelector
from vllm_dflash.checkpoint.spec import DFlash2
from vllm_dflash.model.dflash2_layers import convolve, walk

HIDDEN = 12


def test_what_another_block_holds_does_not_matter() -> None:
    """Not even NaN, which a product with zero would not remove."""
    x, base = torch.randn(6, HIDDEN), torch.randn(3, HIDDEN)
    corrections, offsets = torch.randn(6, 3, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    expected = convolve(x, corrections, base, offsets)[3:]
    x[:3] = torch.nan
    torch.testing.assert_close(convolve(x, corrections, base, offsets)[3:], expected)


SPEC = DFlash2(conv_kernel_size=3, conv_group_size=4, selector_rank=5, selector_top_k=4)


@torch.inference_mode()
def test_the_reference_convolves_as_vllm() -> None:
    convolution = ReferenceConvolution(HIDDEN, SPEC)
    convolution.base_kernel.normal_()
    x = torch.randn(1, 12, HIDDEN)
    before, behind = convolution.kernel_projection(x[0]).view(12, 2, 3, 3).unbind(1)
    shape = {"block_size": 6, "num_groups": 3, "group_size": 4, "taps": 3}
    middle = _grouped_conv(x[0], before, convolution.base_kernel[0], **shape)
    expected = _grouped_conv(middle.tanh(), behind, convolution.base_kernel[1], **shape)
    torch.testing.assert_close(convolution(torch.tanh, x, 6)[0], expected)


@torch.inference_mode()
def test_the_reference_scores_as_vllm() -> None:
    selector = ReferenceSelector(30, HIDDEN, SPEC)
    selector.successor_codebook.normal_()
    logits, hidden = torch.randn(5, 30), torch.randn(5, HIDDEN)
    values, ids = logits.topk(4)
    scores = _score_edges(
        selector.predecessor_codebook,
        selector.successor_codebook,
        ids[None],
        values[None],
        selector.hidden_projection(hidden)[None],
        torch.tensor([7]),
        4,
    )
    tokens, confidence = walk(ids[None], scores)
    expected, chances = selector.walk(logits, hidden, 7)
    assert tokens[0].tolist() == expected
    assert confidence[0].tolist() == pytest.approx(chances, rel=1e-5)
