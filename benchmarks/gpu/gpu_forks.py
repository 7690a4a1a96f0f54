"""Processes that have imported vLLM when they start: forks of one that did nothing else.

Importing vLLM takes a GPU machine some 20 seconds, and a run has dozens of processes. So a run
starts one (`ForkServer`), which imports what they all need and waits. `forked` then stands in for
`subprocess.Popen`, for commands of the form `python -m MODULE ...`.

A fork must not inherit a GPU that is in use, so the server never touches it.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Self, TextIO

import psutil

from engine_child import EngineChild

SERVER = "VLLM_DFLASH_FORKS"
"""Variable that names the server's socket."""
IMPORTED = (
    *("torch", "triton", "transformers", "vllm.entrypoints.llm", "vllm.v1.engine.core"),
    *("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner", "vllm_dflash.plugin"),
    *("vllm_dflash.engine.v2.speculator", "vllm.model_executor.models.qwen3"),
)
"""What is imported before; what is missing is left out."""


class Forked(psutil.Process):
    """A forked process, as far as `subprocess.Popen` is used here."""

    def __init__(self, pid: int, server: socket.socket, stdin: int, stdout: int) -> None:
        super().__init__(pid)
        self._server = server
        self.returncode: int | None = None
        self.stdin: TextIO | None = os.fdopen(stdin, "w") if stdin >= 0 else None
        self.stdout: TextIO | None = os.fdopen(stdout) if stdout >= 0 else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                said = self._server.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("forked", timeout or 0.0) from None
            self.returncode = int(said or b"-9")  # the server is gone
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None


def can_fork(command: Sequence[str]) -> bool:
    """Return whether there is a server, and it can run this command."""
    return SERVER in os.environ and list(command[:2]) == [sys.executable, "-m"]


def forked(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stderr: BinaryIO | TextIO,
    stdin: int | None = None,
    stdout: int | BinaryIO | TextIO | None = None,
    cwd: str | Path | None = None,
    **_: Any,
) -> Forked:
    """Start `python -m MODULE ...` in a session of its own. `stdin` and `stdout` can be pipes."""
    ours, theirs = [-1, -1], [os.open(os.devnull, os.O_RDWR), -1, stderr.fileno()]
    if stdin == subprocess.PIPE:
        os.close(theirs[0])
        theirs[0], ours[0] = os.pipe()
    if stdout == subprocess.PIPE:
        ours[1], theirs[1] = os.pipe()
    else:
        assert stdout is None or not isinstance(stdout, int)
        theirs[1] = os.dup((stdout or stderr).fileno())
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[SERVER])
    asked = {"command": [*command[2:]], "env": dict(env), "cwd": str(cwd or Path.cwd())}
    socket.send_fds(server, [json.dumps(asked).encode() + b"\n"], theirs)
    os.close(theirs[0])
    os.close(theirs[1])
    return Forked(int(server.recv(64)), server, *ours)


class ForkServer:
    """The process that forks, and its end."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        """Start it, and name it in `environment` and in this process's."""
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-dflash-forks-")
        place = str(Path(self._folder.name) / "socket")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as told:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu.gpu_forks", place, *IMPORTED],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                start_new_session=True,  # a Ctrl-C at the terminal is for the kit
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline():  # it is ready; otherwise its log says why not
            environment[SERVER] = os.environ[SERVER] = place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.environ.pop(SERVER, None)
        self._process.communicate()  # the end of its input is its end
        self._folder.cleanup()


def serve(place: str, names: Sequence[str]) -> None:
    """Import these modules, and fork for whoever asks, until the input ends."""
    for name in names:
        with suppress(ImportError):
            import_module(name)
    torch = sys.modules["torch"]
    assert torch.version.cuda is None or not torch.cuda.is_initialized()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    waits = selectors.DefaultSelector()
    waits.register(listener, selectors.EVENT_READ)
    waits.register(sys.stdin, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in waits.select():
            if key.fileobj is sys.stdin:
                for pid in {other.data[0] for other in waits.get_map().values() if other.data}:
                    _kill(pid)
                return
            if key.data:
                _tell_end(waits, *key.data)
                continue
            asker, _ = listener.accept()
            said, places = _receive(asker)
            pid = os.fork()
            if not pid:
                waits.close()
                listener.close()
                asker.close()
                _become(json.loads(said), places)
            for one in places:
                os.close(one)
            asker.sendall(str(pid).encode())
            ended = os.pidfd_open(pid)
            for either in (ended, asker):
                waits.register(either, selectors.EVENT_READ, (pid, ended, asker))


def _receive(asker: socket.socket) -> tuple[bytes, list[int]]:
    said, places, _, _ = socket.recv_fds(asker, 1 << 20, 3)
    while not said.endswith(b"\n"):
        said += asker.recv(1 << 20)
    return said, places


def _tell_end(waits: selectors.BaseSelector, pid: int, ended: int, asker: socket.socket) -> None:
    """Tell how a process ended; or end it, because whoever asked for it is gone."""
    if ended not in waits.get_map():  # both were ready
        return
    if not select.select([ended], [], [], 0)[0]:
        _kill(pid)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        asker.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    waits.unregister(ended)
    waits.unregister(asker)
    os.close(ended)
    asker.close()


def _kill(pid: int) -> None:
    """Kill a fork and what it started; it may not have a session of its own yet."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def _become(asked: dict[str, Any], places: Sequence[int]) -> None:
    """Be `python -m MODULE ...`, and end."""
    os.setsid()
    for number, one in enumerate(places):
        os.dup2(one, number)
        os.close(one)
    sys.stdin = os.fdopen(os.dup(0))
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["command"]
    EngineChild.launch = staticmethod(forked)
    code: Any = 1
    try:
        runpy.run_module(asked["command"][0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
