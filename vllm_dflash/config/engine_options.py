"""`EngineOptions`: decisions about an engine, made once before any of its processes starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from vllm_dflash.checkpoint.spec import DrafterSpec

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

Runner = Literal["v1", "v2"]
"""vLLM's model runner: on `v1` the host plans, on `v2` the device decides."""

MOST_FREE_DRAFTS = 32
"""Maximum per request and step. More are seldom accepted, and each one costs a row to verify."""

TREE_CUTS = 7, 15, 31
"""Node counts that a larger tree may be cut to in a step: 8, 16 or 32 rows with the bonus token, as
in blocks. So trees share the blocks' graphs, and suit kernels that take powers of two rows."""

# Import paths given to vLLM, so that naming a class imports nothing.
CPU_WORKER_V1 = "vllm_dflash.engine.v1.v1_worker.V1CPUWorker"
CPU_WORKER_V2 = "vllm_dflash.engine.v2.v2_cpu_worker.V2CPUWorker"
GPU_WORKER = "vllm_dflash.engine.v2.v2_workers.V2GPUWorker"
SCHEDULER = "vllm_dflash.engine.choose_scheduler.build_scheduler"
DRAFT_MODEL = "vllm_dflash.model.draft_model:DFlashDraftModel"
SHOW_FIGURES = "vllm_dflash.engine.reporting.prometheus.show_figures"
CHECK_REQUESTS = "vllm_dflash.engine.checked_requests.check_requests"
PARSE_TOKEN_BY_TOKEN = "vllm_dflash.engine.vllm_fixes.streamed_pieces.parse_token_by_token"
CPU_RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.CPURayExecutor"
RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.DFlashRayExecutor"

ADDITIONAL_CONFIG_KEY = "vllm_dflash"
"""Key of `EngineOptions` in vLLM's `additional_config`. The value is one JSON string: part of the
compile cache's key, and hashable, so that each process parses it once."""


def tree_sizes(num_nodes: int) -> list[int]:
    """Node counts of a tree of up to N nodes that a step may verify, ascending: N, and cuts of
    less than half of it."""
    return [*(cut for cut in TREE_CUTS if 2 * cut < num_nodes), num_nodes]


@dataclass(frozen=True)
class EngineOptions:
    """How an engine drafts; decided by its front end and read by its other processes.

    Independent of asynchronous scheduling: V1 does not use it on CPUs, and on V2 the device decides
    the same either way.
    """

    num_speculative_tokens: int
    """Maximum number of drafts per request and step, from any source; vLLM reserves room for it."""
    draft_width: int
    """K: maximum number of drafts from the drafter's block."""
    draft_length: Literal["adaptive", "fixed"]
    """`adaptive`: planned every step, from 0 to K. `fixed`: K."""
    drafter: DrafterSpec
    drafter_ranks: int = 1
    """Tensor-parallel ranks that the drafter's layers are split over; 1: each rank has all."""
    most_free: int = 0
    """Maximum number of free drafts per request and step; 0 disables free drafts."""
    captures_lengths: bool = False
    """Whether vLLM gets a table of draft lengths to capture graphs for."""
    runner: Runner = "v1"
    draws_drafts: bool = False
    """Whether drafts at temperature > 0 are drawn, where verification draws."""
    tree_nodes: int = 0
    """Maximum number of nodes in a draft tree; 0: all drafts are chains."""
    most_active: int | None = None
    """The user's limit of requests at a time (`max_num_active_seqs`)."""

    @property
    def block_rows(self) -> int:
        """Rows of a block of K drafts."""
        return self.draft_width + self.drafter.first_draft_row

    @property
    def is_planned(self) -> bool:
        """Whether draft lengths are planned."""
        return self.draft_length == "adaptive"

    @property
    def free_drafts(self) -> bool:
        """Whether free drafts are used."""
        return self.most_free > 0

    @classmethod
    def from_config(cls, vllm_config: VllmConfig) -> EngineOptions:
        """Options of an engine that was started.

        Raises:
            RuntimeError: the engine was started without vllm-dflash.
        """
        additional = vllm_config.additional_config
        written = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None
        if written is None:
            raise RuntimeError(
                "vllm-dflash's draft model or worker runs here, but the front end that started this"
                " engine did not select vllm-dflash and passed no options. On the front end,"
                " install the same version of vllm-dflash, and unset VLLM_PLUGINS or add 'dflash'"
                " to it. Its log says so if the plugin was loaded but does not fit that vLLM."
            )
        return from_json(written)

    def to_json(self) -> str:
        """JSON for `additional_config`; inverse of `from_json`."""
        return TypeAdapter(EngineOptions).dump_json(self).decode()


@lru_cache(maxsize=16)
def from_json(written: str) -> EngineOptions:
    """The options that `to_json` wrote."""
    return TypeAdapter(EngineOptions).validate_json(written)


def runner_here() -> Runner:
    """The runner that vLLM will choose here."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    return "v2" if (HAS_TRITON if asked is None else asked) else "v1"


def uses_rust_front_end() -> bool:
    """Whether `vllm serve` runs vLLM's front end in Rust; a vLLM may have none."""
    from vllm import envs

    return getattr(envs, "VLLM_USE_RUST_FRONTEND", False)


def uses_our_ray_executor(parallel: ParallelConfig) -> bool:
    """Whether our subclass of vLLM's Ray executor places the workers.

    vLLM 0.32 may have its older executor selected; 0.33 has neither that nor the variable.
    """
    from vllm import envs

    is_newer = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    return parallel.distributed_executor_backend == "ray" and is_newer


def worker_here() -> str:
    """The worker class for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return GPU_WORKER
    return CPU_WORKER_V1 if runner_here() == "v1" else CPU_WORKER_V2
