"""Engines that share a machine under Ray: the threads of each, and the variables that say so."""

from __future__ import annotations

import os


def threads_of_each(engines: int) -> int:
    """The machine's cores, dealt out."""
    return max(1, (os.cpu_count() or 1) // engines)


def engine_environment(threads: int) -> dict[str, str]:
    """Variables of an engine that shares its machine with others of Ray's.

    vLLM would bind every engine's threads to the same cores, so none is bound; the rest is what
    vLLM sets where it binds.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
