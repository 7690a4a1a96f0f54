"""vLLM's Ray executor for engines with DFlash: it checks the nodes before workers start.

`DFlashRayExecutor` replaces vLLM's own for `--distributed-executor-backend ray` with DFlash.
`CPURayExecutor` is for nodes without accelerators, which vLLM's own refuses; select it with
`--distributed-executor-backend vllm_dflash.cluster.ray_executor.CPURayExecutor`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

try:
    import ray
except ImportError as error:
    raise ImportError(
        "--distributed-executor-backend asks for Ray, which cannot be imported here:"
        " pip install 'ray>=2.60'"
    ) from error

from vllm_dflash.cluster.nodes import check_nodes
from vllm_dflash.cluster.placement import WorkerBundle, reserve_cpus, worker_bundles
from vllm_dflash.cluster.ray_worker import CPURayWorkerProc, leave, nap_while_waiting
from vllm_dflash.compatibility import check_vllm

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

LEAVE = ray.cloudpickle.dumps(leave)
SECONDS_TO_LEAVE = 3.0
"""How long to wait for workers to exit; the engine's process itself is given 5 s."""

logger = init_logger("vllm.dflash")


class DFlashRayExecutor(RayExecutorV2):
    """vLLM's Ray executor, which first checks that our workers can run on every node.

    Hook "Ray executor": vLLM's `distributed_executor_backend` holds this class from the selection
    of DFlash until the executor is built. It holds the class, not its dotted path, because vLLM
    takes a path for an executor without Ray (`ParallelConfig.use_ray`): no nsight, and wrong
    devices for data-parallel ranks. In that time vLLM compares the setting with "ray" once, for
    `--numa-bind`, which therefore binds the engine's process to the memory nodes of its own GPUs
    instead of all.
    Workers see "ray" as usual, which several functions check (`gpu_worker.Worker.init_device`).
    """

    def _init_executor(self) -> None:
        check_vllm("ray")
        configs = [self.parallel_config]
        if (speculative := self.vllm_config.speculative_config) is not None:  # has two copies
            configs += [speculative.target_parallel_config, speculative.draft_parallel_config]
        for config in configs:
            config.distributed_executor_backend = "ray"
        super()._init_executor()

    def _build_runtime_env(self) -> dict[str, Any]:
        """Check the nodes; vLLM calls this once, after placing the workers. Raises `NodeError`."""
        runtime_env = super()._build_runtime_env()
        check_nodes(self.parallel_config.placement_group, runtime_env)
        return runtime_env


class CPURayExecutor(RayExecutorV2):
    """vLLM's Ray executor for nodes without accelerators.

    Each worker gets a bundle of CPUs and as many threads. Workers use shared memory only with
    others on their node. If the caller has a placement group, it must have a bundle with CPUs for
    each worker; otherwise the executor reserves CPUs of the cluster and releases them at the end.
    """

    def _init_executor(self) -> None:
        self._own_group: PlacementGroup | None = None
        if not current_platform.is_cpu():
            raise ValueError(
                "CPURayExecutor is for CPUs. On this platform, use vLLM's own:"
                " --distributed-executor-backend ray"
            )
        if envs.VLLM_RAY_BUNDLE_INDICES:
            raise ValueError(
                "CPURayExecutor gives its workers the bundles with the most CPUs. Unset"
                " VLLM_RAY_BUNDLE_INDICES, or start the engine in a placement group that has only"
                " the bundles it should use."
            )
        check_vllm(
            "ray", "ray_cpu"
        )  # here, because engines without DFlash may use this executor, too
        try:
            placed = self._place_workers()
            bundles = self.parallel_config.placement_group.bundle_specs
            self._threads = int(min(bundles[bundle]["CPU"] for bundle, _, _ in placed))
            where = ", ".join(f"{rank} on node {ip}" for rank, (_, _, ip) in enumerate(placed))
            logger.info("Ray workers with %d threads each: %s", self._threads, where)
            with _vllm_names_replaced(placed):
                super()._init_executor()
            for queue in self.response_mqs:
                nap_while_waiting(queue)
        except BaseException:
            self.shutdown()
            raise

    def _place_workers(self) -> list[WorkerBundle]:
        """Connect to Ray and ensure a placement group. Returns each worker's bundle."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # as vLLM does
        if not ray.is_initialized():
            ray.init(runtime_env=self.parallel_config.ray_runtime_env)
        workers = self.parallel_config.world_size
        group = self.parallel_config.placement_group or ray.util.get_current_placement_group()
        if group is None:
            group = self._own_group = reserve_cpus(workers)
        self.parallel_config.placement_group = group
        return worker_bundles(group, workers)

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """No resources of its own: the worker's bundle has reserved the CPUs."""
        return {"num_gpus": 0}

    def _build_runtime_env(self) -> dict[str, Any]:
        """Add variables that must be set before a worker's process starts. Raises `NodeError`."""
        runtime_env = super()._build_runtime_env()
        variables = runtime_env["env_vars"]
        variables.setdefault("OMP_NUM_THREADS", str(self._threads))  # Ray's default is 1
        # As vLLM sets for its own processes: Intel OpenMP's threads would spin for 200 ms.
        variables.setdefault("KMP_BLOCKTIME", os.environ.get("KMP_BLOCKTIME", "5"))
        variables.setdefault("KMP_TPAUSE", os.environ.get("KMP_TPAUSE", "0"))
        preload = os.environ.get("LD_PRELOAD", "")
        files = preload.replace(":", " ").split()
        nodes = check_nodes(self.parallel_config.placement_group, runtime_env, files)
        without = [node for node in nodes if node.preload_unsupported_reason]
        if preload and not without:
            variables.setdefault("LD_PRELOAD", preload)
        for node in without:
            logger.warning(
                "workers do not get the engine's LD_PRELOAD and may be much slower without it: %s"
                " %s. Set it when starting each node: LD_PRELOAD=... ray start ...",
                node.name,
                node.preload_unsupported_reason,
            )
        return runtime_env

    def _join_monitor_thread(self) -> None:
        """Let the workers exit and clean up; vLLM's `shutdown` calls this first.

        Workers that vLLM kills do not remove their shared memory.
        """
        handles = getattr(self, "ray_worker_handles", [])
        running = [handle.run_ref for handle in handles if handle.run_ref is not None]
        queue = getattr(self, "rpc_broadcast_mq", None)
        if running and queue is not None and not self.is_failed and ray.is_initialized():
            deadline = time.monotonic() + SECONDS_TO_LEAVE
            with contextlib.suppress(Exception):  # vLLM kills the workers that stay
                queue.enqueue((LEAVE, (), {}, None), timeout=SECONDS_TO_LEAVE)
                left = max(0.0, deadline - time.monotonic())
                ray.wait(running, num_returns=len(running), timeout=left)
        super()._join_monitor_thread()

    def shutdown(self) -> None:
        """End the workers and release the CPUs."""
        super().shutdown()
        group, self._own_group = self._own_group, None
        if group is not None and ray.is_initialized():
            ray.util.remove_placement_group(group)


@contextlib.contextmanager
def _vllm_names_replaced(placed: list[WorkerBundle]) -> Iterator[None]:
    """Replace three names in vLLM's executor module while our CPU executor starts its workers.

    Part of "Ray on CPUs", in the engine's process. `RayWorkerProc`, `initialize_ray_cluster` and
    `get_bundles_sorted_by_node` ask the platform for its accelerator, and a CPU has none. Only
    `_init_executor` uses them in their module. By then Ray is connected and each worker has its
    bundle, so `initialize_ray_cluster` has nothing left to do. No setting achieves this: with
    "CPU" as the device, `initialize_ray_cluster` refuses bundles of more than one;
    `VLLM_RAY_BUNDLE_INDICES` could replace `get_bundles_sorted_by_node`, but vLLM reads variables
    once per process and passes them on to its workers.
    """
    ours = {
        "RayWorkerProc": CPURayWorkerProc,
        "initialize_ray_cluster": lambda *_, **__: None,
        "get_bundles_sorted_by_node": lambda _: placed,
    }
    theirs = {name: getattr(ray_executor_v2, name) for name in ours}
    vars(ray_executor_v2).update(ours)
    try:
        yield
    finally:
        vars(ray_executor_v2).update(theirs)
