"""CPU worker for Model Runner V2; the GPU worker must not import it (`cpu_worker.py`)."""

from __future__ import annotations

from vllm_dflash.engine.cpu_worker import DraftingCPUWorker
from vllm_dflash.engine.v2.v2_workers import V2Worker


class V2CPUWorker(V2Worker, DraftingCPUWorker):
    """V2 worker for CPUs, where kernels run in Triton's interpreter."""
