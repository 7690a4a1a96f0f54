"""LiLiCorr's head, which is vLLM's own: it weighs candidates by those of all block positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.platforms import current_platform

from vllm_dflash.checkpoint.names import LATTICE
from vllm_dflash.checkpoint.spec import DrafterSpec

if TYPE_CHECKING:
    from vllm.model_executor.models.lilicorr import LiLiCorrHead


def make_head(spec: DrafterSpec, quantisation: QuantizationConfig | None) -> LiLiCorrHead:
    """A LiLiCorr drafter's head, without its weights."""
    # Imported here because the front end imports this module: vLLM's compilation backends import
    # FlashInfer, which would initialise CUDA there, and vLLM could then not fork its engine.
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.models.lilicorr import LiLiCorrHead

    assert spec.lilicorr is not None
    with set_model_tag("lilicorr_head"):  # without it, it would share the block's compile cache
        head = LiLiCorrHead(
            model_hidden_size=spec.hidden_size,
            block_size=spec.block_size,
            rms_norm_eps=spec.rms_norm_eps,
            config=spec.lilicorr.model_dump(by_alias=True),
            quant_config=quantisation,
            prefix=LATTICE.removesuffix("."),
        )
    # V1's blocks have any width, and each width would be compiled separately.
    head.do_not_compile |= current_platform.is_cpu()
    return head


def load_head(head: LiLiCorrHead, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load the head's tensors and no others. Returns the names of its parameters.

    Separate from the other tensors, because its `up_proj` is not half of a stacked layer.
    """
    own = [(name.removeprefix(LATTICE), one) for name, one in tensors if name.startswith(LATTICE)]
    loaded = AutoWeightsLoader(head).load_weights(own)
    finish_head(head)
    return loaded


def finish_head(head: LiLiCorrHead) -> None:
    """Fill the head's inference buffers; call after its weights are loaded."""
    head.materialize_inference_buffers(head.slot_embedding.device, head.slot_embedding.dtype)
