"""A copy of the project in which faults are planted and tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from faults.fault import Fault
from faults.fork_server import ForkServer

Result = TypeVar("Result")
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build"
ENVIRONMENT = {
    # Compiled faulty code is not cached where a user's is.
    "XDG_CACHE_HOME": str(BUILD / "faults-cache"),
    "NUMBA_CACHE_LOCATOR_CLASSES": "faults.kept_code.KeptBySource,UserProvidedCacheLocator",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Copy:
    """A copy of the project to plant faults in, with a fork server for each runner."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.project = folder / "project"
        copy_project(self.project)
        self._servers: dict[str, ForkServer] = {}

    def server(self, runner: str) -> ForkServer:
        """Return the runner's server, which starts at first use."""
        if runner not in self._servers:
            log = self.folder / f"{runner}.log"
            self._servers[runner] = ForkServer(self.project, runner, log)
        return self._servers[runner]

    @contextmanager
    def planted(self, fault: Fault, number: int) -> Iterator[None]:
        """Plant a fault. The file's time is unique: compiled files are known by time and size."""
        path = self.project / fault.file
        path.write_text(fault.planted(ROOT))
        os.utime(path, (number, number))
        try:
            yield
        finally:
            shutil.copy2(ROOT / fault.file, path)

    def end(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.end()


def copy_project(folder: Path) -> None:
    """Copy every file that git knows or would add, as it is now; link the virtual environment."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")


@contextmanager
def copied() -> Iterator[Copy]:
    """Make a copy that is removed afterwards."""
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Copy(Path(folder))
        try:
            yield copy
        finally:
            copy.end()


def in_copies(jobs: int, tasks: Sequence[Callable[[Copy], Result]]) -> Iterator[Result]:
    """Run each task in a copy that no other task has meanwhile; yield results as they come."""
    with ExitStack() as stack:
        free: SimpleQueue[Copy] = SimpleQueue()
        for _ in range(min(jobs, len(tasks))):
            free.put(stack.enter_context(copied()))

        def run(task: Callable[[Copy], Result]) -> Result:
            copy = free.get()
            try:
                return task(copy)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(run, task) for task in tasks]
            try:
                for done in as_completed(running):
                    yield done.result()
            finally:
                pool.shutdown(cancel_futures=True)
