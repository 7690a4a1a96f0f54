"""A Ray cluster on one machine: each node is a `ray start` on a loopback address."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.servers import free_port
from support.waiting import PATIENCE_S, wait_for_end, wait_until

RAY = str(Path(sys.executable).with_name("ray"))
SECONDS_TO_LEAVE = 5
"""Processes that still run after this are killed."""
NOT_UP = "a node of Ray's is not up"
SECONDS_TO_START = 200
HEAD = "127.0.0.2"  # Ray treats 127.0.0.1 as the machine's outer address


class RayCluster:
    """A head node; others join and leave. Nothing is left behind, not even a default address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._address = f"{HEAD}:{free_port()}"
        self.access = {
            "RAY_ADDRESS": self._address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        """Environment variables with which programs find and access the cluster."""

    @contextmanager
    def head(self, cpus: int, environment: dict[str, str]) -> Iterator[None]:
        port = self._address.rpartition(":")[2]
        arguments = ["--head", f"--port={port}", "--include-dashboard=false"]
        arguments += [f"--ray-client-server-port={free_port()}"]
        with self._node(HEAD, cpus, arguments, environment):
            yield

    @contextmanager
    def joined(self, ip: str, cpus: int = 1, **environment: str) -> Iterator[None]:
        """Add a node, with these variables besides ours."""
        with self._node(ip, cpus, [f"--address={self._address}"], environment):
            yield

    @contextmanager
    def _node(
        self, ip: str, cpus: int, arguments: list[str], environment: dict[str, str]
    ) -> Iterator[None]:
        log = self._folder / f"{ip}.log"
        access = {name: value for name, value in self.access.items() if name != "RAY_ADDRESS"}
        node = _start(self._folder, ip, cpus, arguments, access | environment, log)
        try:
            _wait_for(node, log)
            yield
        finally:
            _end(node)


@contextmanager
def ray_cluster(cpus: int = 1, **environment: str) -> Iterator[RayCluster]:
    """Start a cluster of one node, with these variables besides ours."""
    folder = Path(tempfile.mkdtemp(prefix="vdf", dir="/tmp"))  # paths of sockets must be short
    try:
        cluster = RayCluster(folder)
        with cluster.head(cpus, environment):
            yield cluster
    finally:
        shutil.rmtree(folder)


def _start(
    folder: Path, ip: str, cpus: int, arguments: list[str], changes: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    command = [RAY, "start", "--block", f"--node-ip-address={ip}", f"--num-cpus={cpus}"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    # For all nodes: a node without one makes its cluster this machine's default.
    command += [f"--temp-dir={folder}"]
    # Two nodes of one machine must not use the same ports.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    # Libraries preloaded into Ray's own processes leave files when these are killed.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    with log.open("w") as file:
        return subprocess.Popen(
            [*command, *arguments],
            env={**environment, **changes},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_for(node: subprocess.Popen[bytes], log: Path) -> None:
    def is_up() -> bool:
        assert node.poll() is None, log.read_text()
        return "Ray runtime started" in log.read_text()

    try:
        wait_until(is_up, NOT_UP, SECONDS_TO_START)
    except AssertionError as late:
        logs = [log, *sorted(log.parent.glob("session_2*/logs/*.*"))]
        tails = [f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        raise AssertionError("\n".join([str(late), *tails])) from None


def _end(node: subprocess.Popen[bytes]) -> None:
    """End a node with all its processes."""
    node.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(SECONDS_TO_LEAVE)
    processes = [process for process in psutil.process_iter() if _session(process) == node.pid]
    _, alive = psutil.wait_procs(processes, timeout=SECONDS_TO_LEAVE)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait(PATIENCE_S)
    wait_for_end(alive)


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0
