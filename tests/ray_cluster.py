"""A Ray cluster of two nodes on this machine: each is a `ray start` on a loopback address."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from servers import free_port

RAY = str(Path(sys.executable).with_name("ray"))
SECONDS_TO_START, SECONDS_TO_LEAVE = 120, 20
HEAD, OTHER = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for the machine's outer address


@contextmanager
def two_nodes(
    cpus: int = 1, other: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Variables by which programs find the cluster. Its second node has others besides ours.

    Nothing is left behind: no process, no folder, no default address for others.
    """
    folder = Path(tempfile.mkdtemp(prefix="vdf", dir="/tmp"))  # paths of sockets must be short
    address = f"{HEAD}:{free_port()}"
    port = address.rpartition(":")[2]
    head = ["--head", f"--port={port}", "--include-dashboard=false"]
    head += [f"--ray-client-server-port={free_port()}"]
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    nodes = []
    try:
        for ip, arguments, changes in (
            (HEAD, head, access),
            (OTHER, [f"--address={address}"], {**access, **(other or {})}),
        ):
            log = folder / f"{ip}.log"
            nodes.append(_start(folder, ip, cpus, arguments, changes, log))
            _wait_for(nodes[-1], log)
        yield {"RAY_ADDRESS": address, **access}
    finally:
        left = [process for node in nodes for process in _end(node)]
        shutil.rmtree(folder)
    assert not left, left


def _start(
    folder: Path,
    ip: str,
    cpus: int,
    arguments: list[str],
    changes: Mapping[str, str],
    log: Path,
) -> subprocess.Popen[bytes]:
    command = [RAY, "start", "--block", f"--node-ip-address={ip}", f"--num-cpus={cpus}"]
    command += ["--object-store-memory=80000000", "--disable-usage-stats"]
    # Of both: a node without one makes its cluster this machine's default.
    command += [f"--temp-dir={folder}"]
    # Two nodes of one machine must not count the same ports.
    command += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    # What is preloaded into Ray's own processes leaves files when they are killed.
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
    deadline = time.monotonic() + SECONDS_TO_START
    while "Ray runtime started" not in (text := log.read_text()):
        if node.poll() is not None or time.monotonic() > deadline:
            pytest.fail(text)
        time.sleep(0.2)


def _end(node: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """End a node with all its processes; returns those that would not go."""
    node.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(SECONDS_TO_LEAVE)
    processes = [process for process in psutil.process_iter() if _session(process) == node.pid]
    _, alive = psutil.wait_procs(processes, timeout=5)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.wait(5)
    return psutil.wait_procs(alive, timeout=5)[1]


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0
