"""The parts of vLLM we rely on, checked by version and signature. All of them are listed here."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_dflash.seams.other_seams import ENGINE, FRONT_END, RAY_CPU, RAY_EXECUTOR
from vllm_dflash.seams.seam import (
    SUPPORTED_VLLM,
    Seam,
    UnsupportedVllmError,
    check_version,
    compare,
)
from vllm_dflash.seams.v1_seams import BOTH_WORKERS, STEP_TIMES, V1_WORKER
from vllm_dflash.seams.v2_seams import V2_WORKER

__all__ = [
    "BOTH_WORKERS",
    "ENGINE",
    "FRONT_END",
    "RAY_CPU",
    "RAY_EXECUTOR",
    "SEAMS",
    "STEP_TIMES",
    "SUPPORTED_VLLM",
    "V1_WORKER",
    "V2_WORKER",
    "Seam",
    "UnsupportedVllmError",
    "check_seams",
    "check_version",
    "check_vllm",
    "compare",
]

SEAMS: Mapping[str, tuple[Seam, ...]] = {
    "front end": FRONT_END,
    "worker, V1": V1_WORKER,
    "worker, V2": V2_WORKER,
    "engine": ENGINE,
    "Ray": RAY_EXECUTOR,
    "Ray on CPUs": RAY_CPU,
    "bench, times of steps": STEP_TIMES,
}
"""All there are: what is not here cannot be checked, and is checked with every release if it is."""


def check_vllm(seams: tuple[Seam, ...]) -> None:
    """Stop, by name, where this vLLM is not the one our hooks were written for."""
    import vllm

    check_version(vllm.__version__)
    check_seams(seams)


def check_seams(seams: tuple[Seam, ...]) -> None:
    """Refuse a vLLM whose functions have changed; `seams` are some of `SEAMS`.

    Raises `UnsupportedVllmError`.
    """
    if not any(seams is each for each in SEAMS.values()):
        raise LookupError("these seams are held against no release: add them to SEAMS")
    compare(seams)
