"""The texts of all requests, on the device: what look-ups read (`text_look_up.py`)."""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.states import RequestState

from vllm_dflash.engine.reporting.log import logger

MOST_TEXT_BYTES = 2 << 30


def text_bytes(num_requests: int, most_tokens: int) -> int:
    """What it takes to keep all that so many requests may come to."""
    return num_requests * most_tokens * torch.int32.itemsize


def has_room_for_texts(num_requests: int, most_tokens: int) -> bool:
    """Whether that is kept on the device; a line in the log if not."""
    size = text_bytes(num_requests, most_tokens)
    if size > MOST_TEXT_BYTES:
        logger().warning(
            "no free drafts: the texts of %d requests of up to %d tokens would take %.1f GiB of the"
            " device's memory. Set --max-num-seqs or --max-model-len lower to get them.",
            num_requests,
            most_tokens,
            size / 2**30,
        )
    return size <= MOST_TEXT_BYTES


def keep_texts_on_device(states: RequestState) -> None:
    """Hook 16: look-ups read all of a request's text, which vLLM keeps in the host's memory.

    Before the runner hands the table to anybody.
    """
    texts = states.all_token_ids
    shape = states.max_num_reqs, states.max_model_len
    states.all_token_ids = StagedWriteTensor(shape, dtype=texts.dtype, device=states.device)
