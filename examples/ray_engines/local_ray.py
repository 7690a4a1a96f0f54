"""A temporary Ray instance on this machine, and how engines share the machine's cores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PROXY_CALLBACK = "ray_engines.client_errors.proxy_middlewares"
"""The middleware that tells clients when a replica died."""

OBJECT_STORE_BYTES = 100 << 20
"""Enough for prompts and texts; Ray's default is 30% of the memory."""

LONGEST_PARENT = 24
"""Characters. Ray appends 72, and the path of a Unix socket has at most 107."""


def search_path() -> str:
    """Return a PYTHONPATH by which other processes find this package, too."""
    paths = [str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(filter(None, paths)))


@contextmanager
def local_ray(
    num_cpus: float | None = None, address: str | None = None, *, show_log: bool = True
) -> Iterator[None]:
    """Start Ray on this machine, or connect to the cluster at `address` if given.

    A new instance uses `num_cpus` cores (default: all), free ports, and a temporary folder that is
    removed at the end. `show_log`: print the output of its processes to standard output. Nodes of a
    cluster need the variables below from whoever starts them (docs/ray_serve.md).
    """
    # Ray's processes inherit these. Actors, tasks and Serve's proxy import this package.
    os.environ["PYTHONPATH"] = search_path()
    # Set before Ray Serve is imported, which reads it at import.
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", PROXY_CALLBACK)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # A replica's guard and resource tracker must outlive it for a moment.
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
    """The machine's cores divided among the engines, at least 1 each."""
    return max(1, (os.cpu_count() or 1) // engines)


def engine_environment(threads: int) -> dict[str, str]:
    """Environment variables of an engine that shares its machine with other engines on Ray.

    vLLM would bind the threads of every engine to the same cores, so binding is off. The other
    variables are those that vLLM sets when it binds threads.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
