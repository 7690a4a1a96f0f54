"""Model Runner V2 on a CPU: its kernels in Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any


def use_triton() -> None:
    """Have vLLM define its kernels where there is no GPU.

    Call before anything imports vLLM: it looks for a Triton driver once, while importing.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    pretend_a_device()


def pretend_a_device() -> None:
    """Have vLLM define its kernels; to be compiled for a GPU, unless they are interpreted."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_NoDevice, compiler=None)


def use_model_runner_v2() -> None:
    """Call before anything imports vLLM."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    use_triton()
    _hasten()


@contextmanager
def triton_attention() -> Iterator[None]:
    """The targets of engines that start inside attend with vLLM's kernel for GPUs, over its cache
    layout. Drafters do with that for CPUs, which is not interpreted."""
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


def _hasten() -> None:
    """Leave out of launches what makes no difference here: half of the interpreter's work."""
    from triton.language.core import dtype
    from triton.runtime import interpreter

    # Triton's language is patched anew for each launch and each call of a function within one.
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
    # Tensors are on the host as it is. For each launch, the interpreter writes whole storages over
    # themselves, as if it had copied them: a cache of K/V takes longer than the kernel.
    interpreter.GridExecutor._init_args_hst = lambda executor, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda executor, *args: None
    # It works out NumPy's name of a type for each load and store.
    of_numpy = interpreter._get_np_dtype
    known = cache(of_numpy)
    interpreter._get_np_dtype = lambda one: (known if type(one) is dtype else of_numpy)(one)
    # Nor do compiled kernels look for overflows.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


class _NoDevice:
    """A driver that says there is a device, for whoever only asks that."""

    def __init__(self) -> None:
        raise RuntimeError("there is no device")

    @staticmethod
    def is_active() -> bool:
        return True
