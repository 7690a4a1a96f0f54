"""`Mode`: what was decided once about an engine, before any of its processes starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from vllm_dflash.checkpoint.spec import DrafterSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Runner = Literal["v1", "v2"]
"""vLLM's model runner: on `v1` the host plans, on `v2` the device decides."""

MOST_FREE_DRAFTS = 32
"""Most for a request in a step. More are seldom accepted, and each that is verified is a row."""

TREE_CUTS = 7, 15, 31
"""Nodes that a tree of more may be cut to for a step: 8, 16 or 32 rows with the bonus token, as
blocks have. So they share graphs with these, and suit kernels that take rows by powers of two."""

# What of ours vLLM is told by name, so that naming it imports nothing.
CPU_WORKER = "vllm_dflash.engine.v1.v1_worker.V1CPUWorker"
CPU_WORKER_V2 = "vllm_dflash.engine.v2.v2_cpu_worker.V2CPUWorker"
GPU_WORKER = "vllm_dflash.engine.v2.v2_workers.GPUWorker"
SCHEDULER = "vllm_dflash.engine.scheduler.build_scheduler"
DRAFT_MODEL = "vllm_dflash.model.draft_model:DFlashDraftModel"
SHOW_FIGURES = "vllm_dflash.engine.reporting.prometheus.show_figures"
REFUSE_REQUESTS = "vllm_dflash.engine.vllm_fixes.request_limits.refuse_what_ends_engines"
CPU_RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.CPURayExecutor"
RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.DFlashRayExecutor"

ADDITIONAL_CONFIG_KEY = "vllm_dflash"
"""Where it travels inside vLLM's `additional_config`, as one string of JSON: part of the key of the
compile cache, and hashable, so that a process parses it once."""


def tree_sizes(num_nodes: int) -> list[int]:
    """Nodes of a tree of up to N that a step may verify, ascending: N, and about half of it or
    less."""
    return [*(cut for cut in TREE_CUTS if 2 * cut < num_nodes), num_nodes]


@dataclass(frozen=True)
class Mode:
    """How an engine drafts, as its front end has decided it and its other processes read it.

    Nothing in it depends on whether vLLM schedules asynchronously: V1 does not on CPUs, and what
    the device decides on V2 is the same either way.
    """

    num_speculative_tokens: int
    """Drafts per request and step at most, whoever made them: what vLLM has room for."""
    draft_width: int
    """K: drafts of the drafter's block at most."""
    draft_length: Literal["adaptive", "fixed"]
    """`adaptive`: planned every step, from 0 to K. `fixed`: K."""
    drafter: DrafterSpec
    drafter_ranks: int = 1
    """Tensor-parallel ranks that the drafter's layers are split over; 1: each has them whole."""
    most_free: int = 0
    """Drafts of a request and step at most that its text predicts; 0: none are looked up."""
    shares_outputs: bool = False
    """Whether they are looked up in what others were answered lately as well."""
    may_trim: bool = True
    """Whether vLLM's adaptive verification may be turned on: not if the user turned it off."""
    captures_lengths: bool = False
    """Whether vLLM is given a table of draft lengths to capture graphs for."""
    estimates_folder: str | None = None
    """Where to keep what was learned; None: nowhere."""
    runner: Runner = "v1"
    tree_nodes: int = 0
    """Most nodes of a draft tree; 0: all drafts are chains."""
    most_active: int | None = None
    """Requests at a time, as the user limits them (`max_num_active_seqs`)."""

    @property
    def is_planned(self) -> bool:
        """Whether draft lengths are planned."""
        return self.draft_length == "adaptive"

    @property
    def free_drafts(self) -> bool:
        """Whether to look up what a request's text predicts."""
        return self.most_free > 0

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Mode:
        """That of an engine that was started.

        Raises:
            RuntimeError: it was started without vllm-dflash.
        """
        additional = vllm_config.additional_config
        written = additional.get(ADDITIONAL_CONFIG_KEY) if isinstance(additional, dict) else None
        if written is None:
            raise RuntimeError(
                "vllm-dflash's draft model or worker runs here, but the front end that started this"
                " engine did not select it, so it has no options: there, install the same version"
                " of vllm-dflash, and leave VLLM_PLUGINS unset or add 'dflash' to it; its log says"
                " so if the plugin was loaded and could not be placed."
            )
        return from_json(written)

    def to_json(self) -> str:
        """To travel in `additional_config`; inverse of `from_json`."""
        return TypeAdapter(Mode).dump_json(self).decode()


@lru_cache(maxsize=16)
def from_json(written: str) -> Mode:
    """Rebuild it from `to_json`."""
    return TypeAdapter(Mode).validate_json(written)


def runner_here() -> Runner:
    """The runner that vLLM is going to choose here."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    asked = envs.VLLM_USE_V2_MODEL_RUNNER
    return "v2" if (HAS_TRITON if asked is None else asked) else "v1"  # few CPUs have Triton


def worker_here() -> str:
    """The worker class for this platform."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return GPU_WORKER
    return CPU_WORKER if runner_here() == "v1" else CPU_WORKER_V2
