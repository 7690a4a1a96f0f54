"""Model Runner V2 on a CPU: its kernels in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from emulated.interpreter import divide_as_gpus_do, hasten, pretend_a_device


def use_triton() -> None:
    """Make vLLM define its kernels without a GPU.

    Call before anything imports vLLM: it looks for a Triton driver once, while importing.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    pretend_a_device()


def use_model_runner_v2() -> None:
    """Choose Model Runner V2. Call before anything imports vLLM."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    use_triton()
    hasten()
    divide_as_gpus_do()


def widen_block_inputs() -> None:
    """Let vLLM's kernel for a block's inputs handle 256 rows at a time. It pads buffers for as many
    rows as there could be, 16 at a time, and the interpreter takes as long for 16 as for 256."""
    from vllm.triton_utils import triton
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    speculator.triton = SimpleNamespace(cdiv=triton.cdiv, next_power_of_2=lambda _: 256)


@contextmanager
def triton_attention() -> Iterator[None]:
    """Make targets of engines that start inside use vLLM's attention kernel for GPUs, with its
    cache layout. Drafters use the one for CPUs, which is not interpreted."""
    import pytest
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector

    path = "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
    with pytest.MonkeyPatch.context() as patch:
        chosen = current_platform.get_attn_backend_cls

        def choose(cls: Any, *args: Any, attn_selector_config: Any, **kwargs: Any) -> str:
            is_drafters = attn_selector_config.use_non_causal
            kwargs["attn_selector_config"] = attn_selector_config
            return chosen(*args, **kwargs) if is_drafters else path

        patch.setattr(type(current_platform), "get_attn_backend_cls", classmethod(choose))
        patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        selector._cached_get_attn_backend.cache_clear()
        yield
    selector._cached_get_attn_backend.cache_clear()
