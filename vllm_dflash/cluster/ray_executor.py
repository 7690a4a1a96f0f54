"""`--distributed-executor-backend vllm_dflash.cluster.ray_executor.CPURayExecutor`: Ray on CPUs.

vLLM's own `ray` backend refuses CPUs, because it looks for accelerators. What is different here:
workers get bundles of CPUs, compute with as many threads, and talk through shared memory only if
they are on one node. Everything else is vLLM's `RayExecutorV2`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from vllm_dflash import plugin
from vllm_dflash.cluster.cores import Core, share_of_cores
from vllm_dflash.cluster.nodes import check_nodes
from vllm_dflash.cluster.placement import (
    describe_workers,
    placed_bundles,
    reserve_cpus,
    threads_of_workers,
)

try:
    import ray
except ImportError as error:
    raise ImportError("CPURayExecutor needs Ray: pip install 'ray>=2.60'") from error

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

BINDING = "VLLM_CPU_OMP_THREADS_BIND"
SECONDS_TO_LEAVE = 3.0
"""For workers that are asked to; the engine's process itself has 5 s."""

SECONDS_OF_A_NAP = 50e-6
"""A step of a small model takes 2 ms."""


class CPURayWorkerProc(RayWorkerProc):
    """A worker in a Ray actor on a node of CPUs."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """The node, and this worker's rank: the executor numbers a node's workers by it."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """Load the model, on this worker's share of the node's cores.

        Args:
            local_rank: among the workers of this node.
            env_vars: variables to set.
            distributed_init_method: where all workers meet.
            driver_env_vars: variables of the engine's process, for those the node has not set.
            assigned_physical_gpu_ids: ranks of all workers of this node.
        """
        driver = dict(driver_env_vars or {})
        driver.pop("LD_PRELOAD", None)  # too late: vLLM would believe what is not loaded
        _take_full_priority()  # threads that this one starts from now on inherit it
        binding = os.environ.get(BINDING) or driver.get(BINDING) or "auto"
        _keep_to_cores(binding, local_rank, len(assigned_physical_gpu_ids or [0]))
        # vLLM's workers use shared memory if they agree on what stands behind the last colon.
        # That is a port, the same on all nodes; torch reads the address and ignores the rest.
        node = ray.get_runtime_context().get_node_id()
        meeting_point = f"{distributed_init_method}?node={node}"
        super().initialize_worker(local_rank, env_vars, meeting_point, driver)
        _nap_while_waiting(self.rpc_broadcast_mq)


def _take_full_priority() -> None:
    """Ray starts workers with a niceness of 15, so that others get their cores first."""
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        init_logger("vllm.dflash").warning(
            "Ray gave this worker a low priority (niceness %d), and only root may raise it."
            " Start the nodes with RAY_worker_niceness=0 in the environment.",
            os.getpriority(os.PRIO_PROCESS, 0),
        )


def _nap_while_waiting(queue: MessageQueue) -> None:
    """A reader of shared memory is to leave its core to those who compute.

    vLLM's asks again and again for the second after a message, and yields in between. That helps
    its own processes; but Linux shares its time out by session first (autogroups), and those that
    Ray has started are in another than the engine: it keeps half a core of them.
    """
    if queue is None or not queue._is_local_reader:
        return
    condition = queue._spin_condition
    sleep_until_notified = condition.wait

    def wait(timeout_ms: int | None = None) -> None:
        if time.monotonic() <= condition.last_read + condition.busy_loop_s:
            time.sleep(SECONDS_OF_A_NAP)
        else:
            sleep_until_notified(timeout_ms)

    condition.wait = wait


def _keep_to_cores(binding: str, local_rank: int, local_workers: int) -> None:
    cores = [Core(cpu.id, cpu.physical_core, cpu.numa_node) for cpu in get_allowed_cpu_list()]
    chosen = share_of_cores(cores, binding, local_rank, local_workers)
    if chosen is None:
        return
    absent = sorted(set(chosen) - os.sched_getaffinity(0))
    if absent:
        raise ValueError(
            f"{BINDING}={binding!r} names cores {absent} of {platform.node()}, which a worker may"
            f" not use there. It may use {sorted(os.sched_getaffinity(0))}."
        )
    os.sched_setaffinity(0, chosen)  # inherited likewise
    if torch.get_num_threads() > len(chosen):
        torch.set_num_threads(len(chosen))


class CPURayExecutor(RayExecutorV2):
    """vLLM's Ray executor for nodes without accelerators.

    The placement group of the caller, where there is one, must have a bundle with CPUs for each
    worker; otherwise free CPUs of the cluster are reserved, and given back at the end.
    """

    checks_nodes_itself = True

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
        workers = self.parallel_config.world_size
        try:
            self._threads = self._place(workers)
            plugin.let_ray_use_cpus(CPURayWorkerProc, partial(placed_bundles, workers=workers))
            super()._init_executor()
            for queue in self.response_mqs:
                _nap_while_waiting(queue)
            group = self.parallel_config.placement_group
            init_logger("vllm.dflash").info("%s", describe_workers(group, workers, self._threads))
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
            init_logger("vllm.dflash").warning(
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
                queue.enqueue((_LEAVE, (), {}, None), timeout=SECONDS_TO_LEAVE)
                left = max(0.0, deadline - time.monotonic())
                ray.wait(running, num_returns=len(running), timeout=left)
        super()._join_monitor_thread()

    def shutdown(self) -> None:
        """End the workers and give back the CPUs."""
        super().shutdown()
        group, self._own_group = self._own_group, None
        if group is not None and ray.is_initialized():
            ray.util.remove_placement_group(group)


def _leave(worker: Any) -> None:
    """In a worker: end its loop, and with it its actor."""
    raise SystemExit


_LEAVE = ray.cloudpickle.dumps(_leave)
