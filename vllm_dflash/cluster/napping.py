"""Readers of vLLM's message queues that nap instead of spinning."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

SECONDS_OF_A_NAP = 50e-6
"""A step of a small model takes 2 ms."""


def nap_while_waiting(queue: MessageQueue | None) -> None:
    """A reader of shared memory is to leave its core to those who compute.

    vLLM's asks again and again for the second after a message, and yields in between. That helps
    its own processes; but Linux shares its time out by session first (autogroups), and those that
    Ray has started are in another than the engine: it keeps half a core of them.

    Part of hook 15: `SpinCondition.wait`, replaced on the instance. Other readers are let be.
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
