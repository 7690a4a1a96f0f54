"""Model Runner V2 on a CPU: its kernels in Triton's interpreter."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace


def use_triton() -> None:
    """Have vLLM define its kernels where there is no GPU.

    Call before anything imports vLLM: it looks for a Triton driver once, while importing.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=_NoDevice, compiler=None)


def use_model_runner_v2() -> None:
    """Call before anything imports vLLM."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    use_triton()
    _hasten()


def _hasten() -> None:
    """Leave out of launches what makes no difference here: half of the interpreter's work."""
    from triton.runtime import interpreter

    # Triton's language is patched anew for each launch and each call of a function within one.
    interpreter._patch_lang = cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda scope: None
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
