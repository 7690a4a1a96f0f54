"""vLLM on the emulated device: its own GPU worker, Model Runner V2 and graphs.

`use()` before anything imports vLLM. All that is replaced in vLLM is replaced here, each with why.
"""

from __future__ import annotations

import os

from emulated import interpreter, reported, torch_cuda
from emulated.vllm_platform import pretend_cuda


def use(*, has_fast_attention: bool = True) -> None:
    """For the rest of this process."""
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # the choice is vLLM's
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Inductor would write kernels for a GPU
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # FlashInfer is not there
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    torch_cuda.install()
    interpreter.pretend_a_device()
    interpreter.hasten()
    interpreter.queue_launches(torch_cuda.device())
    _set_platform()
    _replace(has_fast_attention)


def _set_platform() -> None:
    platform = pretend_cuda()
    platform.capability = reported.CAPABILITY
    platform.dist_backend = "gloo"  # NCCL is not there

    def import_kernels() -> None:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()

    platform.import_kernels = staticmethod(import_kernels)
    import_kernels()


def _replace(has_fast_attention: bool) -> None:
    from emulated import vllm_kernels

    vllm_kernels.define()
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker import gpu_worker

    # Warms up kernels that are not there; it needs torchvision.
    gpu_worker.kernel_warmup = lambda worker: None
    # Triton's interpreter cannot run this kernel.
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch
    if has_fast_attention:
        from emulated import attention

        attention.install()
