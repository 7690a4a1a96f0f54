"""`mask_embedding.pt`, where a checkpoint keeps the mask token's embedding in a file of its own."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

from vllm_dflash.checkpoint.spec import DrafterError, DrafterSpec

if TYPE_CHECKING:
    import torch

MASK_EMBEDDING_FILE = "mask_embedding.pt"


def parse_mask_embedding(spec: DrafterSpec, content: bytes) -> torch.Tensor:
    """The embedding, [H], on the CPU. Never runs code that a pickle asks for.

    Raises:
        DrafterError: it holds anything but a tensor (alone, or as `embedding` of a dictionary), or
            is for another mask token, or of another size.
    """
    import torch

    def refuse(why: str) -> DrafterError:
        return DrafterError(f"drafter {spec.model!r}: {MASK_EMBEDDING_FILE} {why}.")

    try:
        state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    # Whatever torch trips over in a file made to trip it.
    except (pickle.UnpicklingError, RuntimeError, ValueError, LookupError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse(f"cannot be read as tensors and nothing else: {reason}") from error
    if isinstance(state, dict):
        token = state.get("mask_token_id", spec.mask_token_id)
        if token != spec.mask_token_id:
            raise refuse(f"is for mask_token_id {token}, config.json says {spec.mask_token_id}")
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor):
        raise refuse(f"holds a {type(state).__name__}, not a tensor")
    # Before anything is copied: a few bytes can claim to be any number of numbers.
    if state.numel() != spec.hidden_size:
        raise refuse(f"has {state.numel()} numbers, hidden_size is {spec.hidden_size}")
    return state.reshape(-1)
