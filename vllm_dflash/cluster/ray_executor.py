"""vLLM's executor for Ray, as engines with DFlash use it: nodes are asked before workers start.

`DFlashRayExecutor` takes the place of vLLM's own where `--distributed-executor-backend ray` meets
DFlash. `CPURayExecutor` is for clusters of nodes without accelerators, which vLLM's own refuses;
its users name it: `--distributed-executor-backend vllm_dflash.cluster.ray_executor.CPURayExecutor`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

try:
    import ray
except ImportError as error:
    raise ImportError("CPURayExecutor needs Ray: pip install 'ray>=2.60'") from error

from vllm_dflash.cluster.napping import nap_while_waiting
from vllm_dflash.cluster.nodes import check_nodes
from vllm_dflash.cluster.placement import (
    describe_workers,
    placed_bundles,
    reserve_cpus,
    threads_of_workers,
)
from vllm_dflash.cluster.ray_worker import CPURayWorkerProc, leave
from vllm_dflash.seams import RAY_CPU, RAY_EXECUTOR, check_seams, check_version

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup
    from vllm.config import VllmConfig

LEAVE = ray.cloudpickle.dumps(leave)
SECONDS_TO_LEAVE = 3.0
"""For workers that are asked to; the engine's process itself has 5 s."""

logger = init_logger("vllm.dflash")


class DFlashRayExecutor(RayExecutorV2):
    """vLLM's Ray executor, and the setting `distributed_executor_backend` of engines with DFlash.

    Why: a node without this package is named, with the command that mends it, before any worker
    starts; else a worker's import error is all there is. How: vLLM's own setting holds this class
    from the selection of DFlash until the executor is built. It is a class and not its path: vLLM
    takes a path for an executor without Ray (`ParallelConfig.use_ray`), which refuses nsight and
    gives data-parallel ranks the wrong devices. It survives pickling into the engine's process,
    counts in no hash, and has vLLM's `supports_async_scheduling`. While it stands there, vLLM
    compares the setting with "ray" once: `--numa-bind` binds the engine's process to the memory
    nodes of its own GPUs instead of all. Workers see "ray", as always: several functions there
    ask for it (`gpu_worker.Worker.init_device`).
    Replaced by: a hook of vLLM's before workers start.
    """

    def _init_executor(self) -> None:
        check_seams(RAY_EXECUTOR)
        _tell_workers_of_ray(self.vllm_config)
        super()._init_executor()

    def _build_runtime_env(self) -> dict[str, Any]:
        """What vLLM asks for once, when workers have their places. Raises `NodeError`."""
        runtime_env = super()._build_runtime_env()
        check_nodes(self.parallel_config.placement_group, runtime_env)
        return runtime_env


def _tell_workers_of_ray(vllm_config: VllmConfig) -> None:
    configs = [vllm_config.parallel_config]
    if (speculative := vllm_config.speculative_config) is not None:  # has them once more
        configs += [speculative.target_parallel_config, speculative.draft_parallel_config]
    for config in configs:
        config.distributed_executor_backend = "ray"


class CPURayExecutor(RayExecutorV2):
    """vLLM's Ray executor for nodes without accelerators.

    Workers get bundles of CPUs, compute with as many threads, and talk through shared memory only
    if they are on one node. The placement group of the caller, where there is one, must have a
    bundle with CPUs for each worker; otherwise free CPUs of the cluster are reserved, and given
    back at the end.
    """

    def _init_executor(self) -> None:
        self._own_group: PlacementGroup | None = None
        if not current_platform.is_cpu():
            raise ValueError(
                "CPURayExecutor is for CPUs. On this platform, vLLM's own does it:"
                " --distributed-executor-backend ray"
            )
        if envs.VLLM_RAY_BUNDLE_INDICES:
            raise ValueError(
                "CPURayExecutor chooses the bundles of its workers itself: those with the most"
                " CPUs. Unset VLLM_RAY_BUNDLE_INDICES, or start the engine in a placement group"
                " of just the bundles it is to have."
            )
        check_version(vllm.__version__)  # engines without DFlash may use this executor, too
        check_seams(RAY_CPU)
        workers = self.parallel_config.world_size
        try:
            self._threads = self._place(workers)
            with _names_for_cpus(workers):
                super()._init_executor()
            for queue in self.response_mqs:
                nap_while_waiting(queue)
            group = self.parallel_config.placement_group
            logger.info("%s", describe_workers(group, workers, self._threads))
        except BaseException:
            self.shutdown()
            raise

    def _place(self, workers: int) -> int:
        """Connect to Ray and see to a placement group. Returns the threads of each worker."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # as vLLM does
        if not ray.is_initialized():
            ray.init(runtime_env=self.parallel_config.ray_runtime_env)
        group = self.parallel_config.placement_group or ray.util.get_current_placement_group()
        if group is None:
            group = self._own_group = reserve_cpus(workers)
        self.parallel_config.placement_group = group
        return threads_of_workers(group.bundle_specs, workers)

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """Nothing besides its place: its bundle has reserved the CPUs."""
        return {"num_gpus": 0}

    def _build_runtime_env(self) -> dict[str, Any]:
        """What must be there before a worker's process starts. Raises `NodeError`."""
        runtime_env = super()._build_runtime_env()
        variables = runtime_env["env_vars"]
        variables.setdefault("OMP_NUM_THREADS", str(self._threads))  # Ray's own is 1
        # What vLLM sets for its processes: Intel OpenMP's threads would spin for 200 ms.
        variables.setdefault("KMP_BLOCKTIME", os.environ.get("KMP_BLOCKTIME", "5"))
        variables.setdefault("KMP_TPAUSE", os.environ.get("KMP_TPAUSE", "0"))
        preload = os.environ.get("LD_PRELOAD", "")
        files = preload.replace(":", " ").split()
        nodes = check_nodes(self.parallel_config.placement_group, runtime_env, files)
        without = [node for node in nodes if node.has_own_preload or node.missing_files]
        if files and not without:
            variables.setdefault("LD_PRELOAD", preload)
        for node in without:
            lacks = ", ".join(node.missing_files)
            logger.warning(
                "workers do not get the engine's LD_PRELOAD, without which a CPU may be much"
                " slower: %s %s. Start every node with its own: LD_PRELOAD=... ray start ...",
                node.name,
                f"has no {lacks}" if lacks else "was started with one already",
            )
        return runtime_env

    def _join_monitor_thread(self) -> None:
        """First thing of vLLM's `shutdown`: let the workers leave, so that they clean up.

        What vLLM kills leaves its shared memory behind.
        """
        handles = getattr(self, "ray_worker_handles", [])
        running = [handle.run_ref for handle in handles if handle.run_ref is not None]
        queue = getattr(self, "rpc_broadcast_mq", None)
        if running and queue is not None and not self.is_failed and ray.is_initialized():
            deadline = time.monotonic() + SECONDS_TO_LEAVE
            with contextlib.suppress(Exception):  # whoever stays is killed
                queue.enqueue((LEAVE, (), {}, None), timeout=SECONDS_TO_LEAVE)
                left = max(0.0, deadline - time.monotonic())
                ray.wait(running, num_returns=len(running), timeout=left)
        super()._join_monitor_thread()

    def shutdown(self) -> None:
        """End the workers and give back the CPUs."""
        super().shutdown()
        group, self._own_group = self._own_group, None
        if group is not None and ray.is_initialized():
            ray.util.remove_placement_group(group)


@contextlib.contextmanager
def _names_for_cpus(workers: int) -> Iterator[None]:
    """Hook 15, in the engine's process, only while our executor for CPUs starts its workers.

    `RayWorkerProc`, `initialize_ray_cluster` and `get_bundles_sorted_by_node`, in the module of
    vLLM's Ray executor. Why: all three ask the platform for its accelerator, and a CPU has none.
    How: rebound around `_init_executor`, the only function there that uses them, and put back
    behind it. Our executor has connected and placed its workers before, so nothing is left for
    the second. No setting does it: with "CPU" for a device, the second refuses bundles of more
    than one; `VLLM_RAY_BUNDLE_INDICES` would do for the third, but vLLM reads variables once in
    a process, and hands them to its workers.
    Replaced by: a `ray_device_key` of vLLM's CPU platform.
    """
    ours = {
        "RayWorkerProc": CPURayWorkerProc,
        "initialize_ray_cluster": lambda *_, **__: None,
        "get_bundles_sorted_by_node": partial(placed_bundles, workers=workers),
    }
    theirs = {name: getattr(ray_executor_v2, name) for name in ours}
    vars(ray_executor_v2).update(ours)
    try:
        yield
    finally:
        vars(ray_executor_v2).update(theirs)
