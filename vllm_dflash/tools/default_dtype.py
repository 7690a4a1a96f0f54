"""The default dtype of the engines that a command starts."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_dflash.checkpoint.read import load_config
from vllm_dflash.checkpoint.spec import DrafterError
from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import flag_names

IN_FLOAT32 = (
    "this CPU has no bfloat16 instructions (AVX-512 BF16), so bfloat16 is several times slower than"
    " float32: the engines run in float32 (--dtype auto: run them as `vllm serve` would)"
)


def emulates_bfloat16() -> bool:
    """Whether vLLM runs on an x86 CPU without bfloat16 instructions, which emulates them."""
    import torch
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    features = torch.cpu.get_capabilities()
    return features["architecture"] == "x86_64" and not features["avx512_bf16"]


def is_quantised(model: str) -> bool:
    """Whether a model's config says so; most of vLLM's quantised layers do not run in float32."""
    try:
        return bool(load_config(model).get("quantization_config"))
    except DrafterError:  # the engine will report what is wrong
        return False


def with_dtype(
    given: str | None, progress: Progress, target: str, flags: Sequence[str] = ()
) -> list[str]:
    """Return flags of `vllm serve` with a `--dtype`, if the choice is not left to vLLM.

    `given`: the command's `--dtype`, which holds, like one in `flags`.
    """
    if given is not None:
        return [*flags, "--dtype", given]
    if "--dtype" in flag_names(flags) or not emulates_bfloat16() or is_quantised(target):
        return [*flags]
    progress.say(IN_FLOAT32)
    return [*flags, "--dtype", "float32"]
