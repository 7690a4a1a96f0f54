"""Planning is compiled in a process of its own while the models load: a core is idle then.

The first start of a version on a machine would wait for it otherwise. What is compiled is kept on
disk (`planning/compiled.py`), where workers and schedulers find it; later starts find it there, and
start no process.
"""

from __future__ import annotations

import subprocess
import sys

from vllm_dflash.planning.rehearsal import is_rehearsed

LONGEST_SECONDS = 300
"""That a worker waits. Then it compiles by itself."""


class CompileAside:
    """Compiles what planning asks for on one of the two model runners."""

    def __init__(self, runner: str) -> None:
        """Start, unless that was done before; `runner`: v1 or v2."""
        self._process: subprocess.Popen[bytes] | None = None
        if not is_rehearsed(runner):
            command = [sys.executable, "-m", "vllm_dflash.planning.rehearsal", runner]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)

    def wait(self) -> None:
        """Until all is compiled. One that fails is not heard of: who waits compiles by itself."""
        if self._process is not None:
            try:
                self._process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                self.stop()

    def stop(self) -> None:
        """The engine ends."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
