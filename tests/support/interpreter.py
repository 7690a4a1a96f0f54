"""Model Runner V2 on a CPU: its kernels in Triton's interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace


def use_model_runner_v2() -> None:
    """Call before anything imports vLLM: it looks for a Triton driver once, while importing."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)
