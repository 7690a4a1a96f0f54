"""An engine in its own process that also reports on its workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from stepped_engine import SteppedEngine

MARK = "MARK_OF_THE_TEST"


class RayEngine(SteppedEngine):
    def workers(self) -> list[dict[str, Any]]:
        return self._engine.collective_rpc(_build_look_around())


def _build_look_around() -> Callable[[Any], dict[str, Any]]:
    """Return a nested function. It is sent to workers as code: they have no tests to import."""

    def look_around(worker: Any) -> dict[str, Any]:
        import os
        import sys

        import ray
        import torch
        from vllm.distributed import get_tp_group

        kind = type(worker.worker)
        all_reduce = get_tp_group().device_communicator.dist_module
        with open("/proc/self/maps") as maps:
            mapped = maps.read()
        return {
            "pid": os.getpid(),
            "actor": ray.get_runtime_context().get_actor_id(),
            "node": ray.util.get_node_ip_address(),
            "worker": f"{kind.__module__}.{kind.__qualname__}",
            "mark": os.environ.get(mark),
            "threads": torch.get_num_threads(),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "uses_shared_memory": all_reduce is not torch.distributed,
            "preloaded": [name for name in preload if os.path.realpath(name) in mapped],
            # Intel OpenMP's own entry of a killed process stays in any case.
            "shared_memory": sorted(
                {
                    line.rpartition(" ")[2]
                    for line in mapped.splitlines()
                    if " /dev/shm/" in line and "__KMP_" not in line and "(deleted)" not in line
                }
            ),
            "has_plugin": "vllm_dflash.plugin" in sys.modules,
        }

    mark, preload = MARK, os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return look_around
