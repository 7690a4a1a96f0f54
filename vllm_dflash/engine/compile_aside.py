"""Compiles the planner in a separate process while the models load, when a core is idle.

Otherwise the first start of a version on a machine would wait for it. Compiled code is cached on
disk (`planning/compiled.py`) for workers and schedulers; later starts find it there and start no
process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.planning.rehearsal import is_rehearsed, rehearse

LONGEST_SECONDS = 300
"""Maximum time that a worker waits before it compiles the planner itself."""


def move_to_other_cores(process: int) -> None:
    """Move a process to the cores that this worker does not use, if there are any.

    vLLM binds a CPU worker to its share of the cores, and its child processes inherit that. The
    worker's parent still has all cores.

    Raises:
        OSError: the system refuses.
    """
    if hasattr(os, "sched_setaffinity"):
        given, own = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
        os.sched_setaffinity(process, given - own or own)


class CompileAside:
    """Compiles the planner of one model runner."""

    def __init__(self, runner: str, *, starts: bool = True) -> None:
        """Start compiling, unless that was done before or cannot be cached.

        Args:
            runner: `v1` or `v2`.
            starts: whether to start the process; True in one worker per node. The others compile
                what is still missing in `finish`.
        """
        self._runner = runner
        self._process: subprocess.Popen[bytes] | None = None
        if starts and sys.executable and not is_rehearsed(runner):
            # -P: import no modules from the user's current folder.
            command = [sys.executable, "-P", "-m", "vllm_dflash.planning.rehearsal", runner]
            nowhere = subprocess.DEVNULL
            with suppress(OSError):  # the process cannot be started: `finish` compiles
                self._process = subprocess.Popen(
                    command, stdin=nowhere, stdout=nowhere, stderr=nowhere
                )
                move_to_other_cores(self._process.pid)

    def finish(self, max_draft: int, most_free: int) -> None:
        """Wait, then load the compiled code in this process, and compile here if the other process
        failed. On V2, where schedulers plan, this process may contain the scheduler, too."""
        if self._process is not None:
            if self._process.poll() is None:
                logger().info("the planner is being compiled, once for each version on a machine")
            try:
                self._process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                self.stop()
        rehearse(self._runner, max_draft, most_free)

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
