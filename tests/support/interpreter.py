"""Model Runner V2 on a CPU: its kernels in Triton's interpreter."""

from __future__ import annotations

import os
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


class _NoDevice:
    """A driver that says there is a device, for whoever only asks that."""

    def __init__(self) -> None:
        raise RuntimeError("there is no device")

    @staticmethod
    def is_active() -> bool:
        return True
