"""A Ray of this program's own, which leaves nothing behind, and how engines share its machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

PROXY_CALLBACK = "vllm_dflash.cluster.replicas.client_errors.proxy_middlewares"
"""What tells clients of a replica that died."""

OBJECT_STORE_BYTES = 100 << 20
"""Prompts and texts: Ray's own default is 30% of the memory."""

LONGEST_PARENT = 24
"""Characters: Ray puts 72 behind it, and paths of Unix sockets end at 107."""


@contextmanager
def local_ray(
    num_cpus: float | None = None, address: str | None = None, *, show_log: bool = True
) -> Iterator[None]:
    """Start Ray on this machine, or connect to a cluster where `address` names one.

    What is started uses `num_cpus` cores (all, by default), ports that are free, and a temporary
    folder that is removed in the end. `show_log`: what its processes print, on standard output.
    """
    # Before anything of Ray Serve is imported, which reads it at once; Ray's processes inherit it.
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", PROXY_CALLBACK)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A replica's guard and resource tracker are to outlive it for a moment.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
    import ray

    with ExitStack() as stack:
        options: dict[str, Any] = {"address": address}
        if address is None:
            parent = tempfile.gettempdir()
            folder = tempfile.TemporaryDirectory(
                prefix="dflash-ray-",
                dir=parent if len(parent) <= LONGEST_PARENT else "/tmp",
                ignore_cleanup_errors=True,
            )
            options = {
                "address": "local",
                "num_cpus": num_cpus,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": stack.enter_context(folder),
            }
        stack.callback(ray.shutdown)
        ray.init(log_to_driver=show_log, **options)
        yield


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
