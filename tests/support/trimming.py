"""vLLM's adaptive verification without a GPU: the device drops drafts in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification

from support.interpreter import triton_attention
from vllm_dflash.engine.v2 import loaded_speculator


class _Nothing:
    """A stream or an event of a device that does everything in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@contextmanager
def trimming(*, with_kernel: bool = True) -> Iterator[None]:
    """Make vLLM trim drafts in engines that start inside, eagerly.

    Attention uses vLLM's kernel for GPUs, which reads each request's rows on the device, or the one
    for CPUs, which is not interpreted and reads the same numbers there.
    """
    attention = triton_attention() if with_kernel else nullcontext()
    with pytest.MonkeyPatch.context() as patch, attention:
        patch.setattr(loaded_speculator, "why_untrimmed", lambda *_: None)
        patch.setattr(model_runner, "resolve_adaptive_cudagraph_mode", lambda mode, **_: mode)
        patch.setattr(torch.cuda, "Stream", _Nothing)
        patch.setattr(torch.cuda, "Event", _Nothing)
        patch.setattr(torch.cuda, "current_stream", _Nothing)
        for name, stand_in in (
            ("stream", lambda *_: nullcontext()),
            ("get_query_lens_mismatch_unsupported_backend", lambda *_, **__: None),
            ("get_varlen_cudagraph_unsupported_backend", lambda *_, **__: None),
        ):
            patch.setattr(adaptive_verification, name, stand_in)
        yield
