"""The dtype of the engines that a command starts, unless its user names one."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_dflash.checkpoint.read import load_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.tools.progress import Progress

IN_FLOAT32 = (
    "this CPU has no instructions for bfloat16 (AVX-512 BF16), which makes it several times slower"
    " than float32: the engines run in float32 (--dtype auto: as they are served)"
)


def emulates_bfloat16() -> bool:
    """Whether vLLM runs on an x86 CPU that computes bfloat16 in float32, step by step."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    features = torch.cpu.get_capabilities()
    return features["architecture"] == "x86_64" and not features["avx512_bf16"]


def is_quantised(model: str) -> bool:
    """Whether its config says so: most of vLLM's quantised layers have no float32."""
    try:
        return bool(load_config(model).get("quantization_config"))
    except DrafterError:  # the engine will say what is wrong with it
        return False


def choose_dtype(
    given: str | None, progress: Progress, target: str, flags: Sequence[str] = ()
) -> dict[str, str]:
    """The engine argument `dtype`, or none where the model's own will do; says why.

    Args:
        given: by the user of the command.
        progress: told why.
        target: folder or repository.
        flags: of `vllm serve`, which may name it, too.
    """
    if given is not None:
        return {"dtype": given}
    is_named = any(flag.partition("=")[0] == "--dtype" for flag in flags)
    if is_named or not emulates_bfloat16() or is_quantised(target):
        return {}
    progress.say(IN_FLOAT32)
    return {"dtype": "float32"}
