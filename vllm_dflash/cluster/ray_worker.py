"""The worker of our Ray executor for CPUs: its cores, priority and messages."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import ray
import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.logger import init_logger
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc

from vllm_dflash.cluster.placement import BINDING, share_of_cores

SECONDS_OF_A_NAP = 50e-6
"""Short compared with a step, which takes 2 ms for a small model."""

logger = init_logger("vllm.dflash")


class CPURayWorkerProc(RayWorkerProc):
    """A worker in a Ray actor on a node without accelerators."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the node id and, as a device id, the rank: vLLM numbers a node's workers by it."""
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        """Load the model, using this worker's share of the node's cores.

        `local_rank`: among the node's workers, whose ranks are `assigned_physical_gpu_ids`.
        """
        driver = dict(driver_env_vars or {})
        driver.pop("LD_PRELOAD", None)  # too late to load it, but vLLM would think it is loaded
        take_full_priority()  # inherited by threads that start from now on
        binding = os.environ.get(BINDING) or driver.get(BINDING) or "auto"
        keep_to_cores(binding, local_rank, len(assigned_physical_gpu_ids or [0]))
        # vLLM's workers use shared memory if they agree on what follows the last colon. That is a
        # port, the same on all nodes, so add the node; torch ignores what follows the address.
        node = ray.get_runtime_context().get_node_id()
        meeting_point = f"{distributed_init_method}?node={node}"
        super().initialize_worker(local_rank, env_vars, meeting_point, driver)
        nap_while_waiting(self.rpc_broadcast_mq)


def take_full_priority() -> None:
    """Undo Ray's niceness of 15 for workers, which lets other processes have their cores first."""
    if os.getpriority(os.PRIO_PROCESS, 0) <= 0:
        return
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        logger.warning(
            "Ray gave this worker a low priority (niceness %d), and only root may raise it."
            " Start the nodes with RAY_worker_niceness=0 in the environment.",
            os.getpriority(os.PRIO_PROCESS, 0),
        )


def keep_to_cores(binding: str, local_rank: int, local_workers: int) -> None:
    """Bind this process to its share of the node's cores; see `share_of_cores`.

    Raises:
        ValueError: the node lacks these cores, or this process may not use them.
    """
    chosen = share_of_cores(get_allowed_cpu_list(), binding, local_rank, local_workers)
    if chosen is None:
        return
    absent = sorted(set(chosen) - os.sched_getaffinity(0))
    if absent:
        raise ValueError(
            f"{BINDING}={binding!r} names cores {absent} of {platform.node()}, which a worker may"
            f" not use there. It may use {sorted(os.sched_getaffinity(0))}."
        )
    os.sched_setaffinity(0, chosen)  # inherited by threads that start from now on
    if torch.get_num_threads() > len(chosen):
        torch.set_num_threads(len(chosen))


def nap_while_waiting(queue: MessageQueue | None) -> None:
    """Make a reader of shared memory sleep briefly instead of spinning, to leave its core free.

    For a second after each message, vLLM's reader polls and yields. Yielding helps vLLM's own
    processes, but Linux divides time by session first (autogroups), and Ray's workers are in
    another session than the engine, so the spinning engine would take half a core from them.

    Part of "Ray on CPUs": replaces `SpinCondition.wait` on the instance. Other readers stay.
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


def leave(worker: Any) -> None:
    """End a worker's loop, and with it its actor; the executor sends this to all at the end."""
    raise SystemExit
