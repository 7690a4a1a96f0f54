"""vLLM on the emulated device: its own GPU worker, Model Runner V2 and graphs.

Call `use()` before anything imports vLLM. Everything that is replaced in vLLM is replaced here,
with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from emulated import interpreter, reported, torch_cuda
from emulated.vllm_platform import pretend_cuda


def use() -> None:
    """Set up vLLM for the rest of this process. Further calls do nothing."""
    if torch_cuda.is_installed():
        return
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # the choice is vLLM's
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Inductor would write kernels for a GPU
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # FlashInfer is not available
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    torch_cuda.install()
    interpreter.pretend_a_device()
    interpreter.hasten()
    interpreter.divide_as_gpus_do()
    interpreter.queue_launches(torch_cuda.device())
    _set_platform()
    _replace()


@contextmanager
def another_gpu(major: int, minor: int) -> Iterator[None]:
    """Engines that start inside find a GPU of this capability: 8.0 is an A100, 10.0 a B200."""
    from vllm.platforms import current_platform

    platform, before = type(current_platform), reported.CAPABILITY
    platform.capability = reported.CAPABILITY = (major, minor)
    try:
        yield
    finally:
        platform.capability = reported.CAPABILITY = before


@contextmanager
def with_dynamo() -> Iterator[None]:
    """Trace models that are built inside, for vLLM's piecewise graphs. The backend "eager" compiles
    them: Inductor would write kernels for a GPU."""
    import torch

    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    try:
        with torch._dynamo.config.patch(disable=False):
            yield
    finally:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _set_platform() -> None:
    platform = pretend_cuda()
    platform.capability = reported.CAPABILITY
    platform.dist_backend = "gloo"  # NCCL is not available

    def import_kernels() -> None:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()

    platform.import_kernels = staticmethod(import_kernels)
    import_kernels()


def _replace() -> None:
    from emulated import attention, vllm_kernels

    vllm_kernels.define()
    from vllm.device_allocator import cumem
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_worker

    from emulated.vllm_sleep import SleepingMemory

    cumem.cumem_available, cumem.CuMemAllocator = True, SleepingMemory
    # It warms up kernels that do not exist here, and needs torchvision.
    gpu_worker.kernel_warmup = lambda worker: None
    # Triton's interpreter cannot run this kernel. Its other arguments are for speed.
    sort = topk_topp_sampler.apply_top_k_top_p_pytorch
    topk_topp_sampler.apply_top_k_top_p_triton = lambda logits, k, p, **_: sort(logits, k, p)
    attention.install()
