"""No process outlives the one that started it, however that ends.

An engine's processes do not notice a SIGKILL of their parent: they would go on, with their memory
and cores, beside the replica that takes its place. This file is also run, as a program of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import resource_tracker


class Guard:
    """Puts this process into a group of its own; when it dies, the others of the group do, too.

    Children belong to the group unless they leave it. The guard is a small process outside the
    group that waits at a pipe which the death of this process closes. Python's resource tracker,
    which removes shared memory that nobody uses any more, is started outside, too: Ray's raylet
    may be first to kill the group, and takes all of it.

    To be made before anything has started a resource tracker, and not in the leader of a session.
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
        """There is nobody left to guard: the children have ended.

        Waits until the resource tracker has done its work, for Ray kills a worker's children where
        that ends by itself.
        """
        if self._process.poll() is None:
            self._process.communicate(b"dismissed")
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def main() -> None:
    """Wait for the end of the guarded process; kill its group unless there is nothing to guard."""
    if not sys.stdin.buffer.read():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(sys.argv[1]), signal.SIGKILL)


if __name__ == "__main__":
    main()
