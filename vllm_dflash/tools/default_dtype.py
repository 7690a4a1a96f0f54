"""The dtype of the engines that a command starts, unless its user names one."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_dflash.tools.progress import Progress

IN_FLOAT32 = (
    "this CPU has no instructions for bfloat16 (AVX-512 BF16), which makes it several times slower"
    " than float32: the engines run in float32 (--dtype bfloat16: as they are served)"
)


def emulates_bfloat16() -> bool:
    """Whether vLLM runs on an x86 CPU that computes bfloat16 in float32, step by step."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    features = torch.cpu.get_capabilities()
    return features["architecture"] == "x86_64" and not features["avx512_bf16"]


def choose_dtype(
    given: str | None, progress: Progress, flags: Sequence[str] = ()
) -> dict[str, str]:
    """The engine argument `dtype`, or none where the model's own will do; says why.

    `flags` of `vllm serve` may name it, too.
    """
    if given is not None:
        return {"dtype": given}
    if any(flag.partition("=")[0] == "--dtype" for flag in flags) or not emulates_bfloat16():
        return {}
    progress.say(IN_FLOAT32)
    return {"dtype": "float32"}
