"""Planning is compiled in a process of its own while the models load: a core is idle then.

The first start of a version on a machine would wait for it otherwise. What is compiled is kept on
disk (`planning/compiled.py`), where workers and schedulers find it; later starts find it there, and
start no process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

from vllm_dflash.engine.reporting.log import logger
from vllm_dflash.planning.rehearsal import is_rehearsed, rehearse

LONGEST_SECONDS = 300
"""That a worker waits. Then it compiles by itself."""


def keep_off_own_cores(process: int) -> None:
    """Give a process the cores that this worker leaves to others, if there are any.

    vLLM binds a CPU worker to its share of the cores, and what it starts inherits that. Whoever
    started the worker knows what there is. Raises `OSError`.
    """
    if hasattr(os, "sched_setaffinity"):
        given, own = os.sched_getaffinity(os.getppid()), os.sched_getaffinity(0)
        os.sched_setaffinity(process, given - own or own)


class CompileAside:
    """Compiles what planning asks for on one of the two model runners."""

    def __init__(self, runner: str, *, starts: bool = True) -> None:
        """Start, unless that was done before; `runner`: v1 or v2. One worker of a node `starts`;
        others compile what is missing when they ask for it."""
        self._runner = runner
        self._process: subprocess.Popen[bytes] | None = None
        if starts and sys.executable and not is_rehearsed(runner):
            # -P: no module of the folder that the user happens to be in.
            command = [sys.executable, "-P", "-m", "vllm_dflash.planning.rehearsal", runner]
            nowhere = subprocess.DEVNULL
            with suppress(OSError):  # no room for a process: this one compiles
                self._process = subprocess.Popen(
                    command, stdin=nowhere, stdout=nowhere, stderr=nowhere
                )
                keep_off_own_cores(self._process.pid)

    def finish(self, max_draft: int, most_free: int) -> None:
        """Wait, and have all that is compiled in this process, too: on V2, where schedulers plan,
        one may live in it. If the other process has failed, this one compiles."""
        if self._process is not None:
            if self._process.poll() is None:
                logger().info("the planner is being compiled, once for each version on a machine")
            try:
                self._process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                self.stop()
        rehearse(self._runner, max_draft, most_free)

    def stop(self) -> None:
        """The engine ends."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
