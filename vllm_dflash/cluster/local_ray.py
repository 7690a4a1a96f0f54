"""A Ray of this program's own, which ends with it and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_dflash.cluster.replicas.client_errors import PROXY_CALLBACK

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

    if address is not None:
        ray.init(address=address, log_to_driver=show_log)
        try:
            yield
        finally:
            ray.shutdown()
        return
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(
        prefix="dflash-ray-", dir=parent if len(parent) <= LONGEST_PARENT else "/tmp"
    )
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=show_log,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
