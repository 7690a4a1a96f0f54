"""Ends an engine's processes with the process that started them, however that one ends.

An engine's processes do not notice a SIGKILL of their parent: they would keep their memory and
cores beside the replica that replaces it. This file also runs as a program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker


class Guard:
    """Puts this process in its own process group, which is killed when this process dies.

    Children belong to the group unless they leave it. The guard is a small process outside the
    group that waits on a pipe, which closes when this process dies. Python's resource tracker,
    which removes unused shared memory, is started outside the group as well, because Ray's raylet
    may kill the whole group first.

    Create it before anything has started a resource tracker, and not in a session leader.
    """

    def __init__(self) -> None:
        group = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", __file__, str(group)],
            stdin=subprocess.PIPE,
            process_group=0,
        )
        os.setpgid(0, self._process.pid)
        resource_tracker.ensure_running()
        os.setpgid(0, group)

    def dismiss(self) -> None:
        """End the guard once the children have ended.

        Waits for the resource tracker to finish, because Ray kills a worker's children when the
        worker exits by itself.
        """
        if self._process.poll() is None:
            self._process.communicate(b"dismissed")
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def main() -> None:
    """Wait for the guarded process to end, then kill its group unless the guard was dismissed."""
    if not sys.stdin.buffer.read():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
