"""Runs `vllm serve` in processes of its own, and sends it requests over HTTP.

vLLM's start cannot be interrupted safely: if Ctrl-C reaches one of its processes during its start,
the others wait for it forever. So a server's processes are in their own session, which Ctrl-C does
not reach. They end together: the command ends them or, if the command was killed, they end by
themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

from vllm_dflash.tools import server_process
from vllm_dflash.tools.server_process import (
    FACTS_PATH,
    PARENT,
    REFUSAL,
    REFUSED,
    SECONDS_TO_STOP,
    Facts,
)

HOST = "127.0.0.1"
"""Other machines cannot reach the servers."""
NAMED_ELSEWHERE = ("--model", "--model-tag", "-sc")
"""Flags that set the target or, with those that begin with --spec, the speculative config."""
UNREACHABLE = ("--uds", "--api-key", "--headless", "--ssl", "--disable-log-stats", "--grpc")
"""How flags begin with which the server could not be asked, or would not count its drafts."""
SECONDS_BETWEEN_LOOKS = 0.5
LAST_LINES = 15
"""Lines shown from the end of a log without errors."""
ERROR_LINE = re.compile(
    r"^(?:\([\w-]+ pid=\d+\) )?(?:\[rank\d+\]: )?(?:ERROR [^]]*\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$",
    re.MULTILINE,
)
"""The last line of a traceback, with or without the prefixes of vLLM and PyTorch."""


class EngineDied(RuntimeError):
    """A server ended, could not start, or failed. The message lists its errors, the root cause
    first."""

    def __init__(self, log: Path, said: str | None = None) -> None:
        """`log`: the server's log, which the message points to. `said`: how it answered, if it did
        not end."""
        if said is not None:
            super().__init__(f"an engine failed: {said}\nits log: {log}")
            return
        text = log.read_text(errors="replace")
        lines = ["an engine died:", *dict.fromkeys(ERROR_LINE.findall(text))]
        if len(lines) == 1:
            lines = ["an engine died; the end of its log:", *text.splitlines()[-LAST_LINES:]]
        super().__init__("\n  ".join(lines) + f"\nits log: {log}")


@contextlib.contextmanager
def temporary_logs(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for logs; it is kept if an engine died, or on an interrupt."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except (EngineDied, KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A `vllm serve` process, which ends with the context."""

    def __init__(
        self,
        log: Path,
        model: str,
        flags: Sequence[str] = (),
        *,
        speculative_config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        module: str = server_process.__name__,
    ) -> None:
        """Start the process, without waiting for it.

        `log`: file for everything that vLLM prints. `flags`: more flags of `vllm serve`.
        `environment`: variables to set or, if None, to unset for the process. `module`: what runs
        `vllm serve` when it is run as a program. Raises ValueError for flags that set what other
        arguments do.
        """
        for name in flag_names(flags):
            if name in NAMED_ELSEWHERE or name.startswith("--spec"):
                raise ValueError(f"{name} after --: the target and the drafter are set before it.")
            if name.startswith(UNREACHABLE):
                raise ValueError(f"{name} after --: this command could not ask such a server.")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.facts: Facts
        """Known once it serves."""
        # Stays bound, so that nobody else gets the port before vLLM listens there.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind((HOST, 0))
        self._port: int = self._reserved.getsockname()[1]
        command = [sys.executable, "-m", module, "serve", model, *flags]
        command += ["--host", HOST, "--port", str(self._port)]
        command += ["--middleware", f"{server_process.__name__}.FactsMiddleware"]
        if speculative_config is not None:
            command += ["--speculative-config", json.dumps(speculative_config)]
        # A key would be asked of every request.
        ours = {"VLLM_API_KEY": None, PARENT: str(os.getpid())}
        variables = {**os.environ, **ours, **environment}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={name: value for name, value in variables.items() if value is not None},
                # Ctrl-C must reach only the command, which then ends its servers.
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        """Return the server's address."""
        return f"http://{HOST}:{self._port}"

    def wait(self) -> Facts:
        """Wait until the server serves. Returns facts about its engine.

        Raises:
            ValueError: the engine refused its arguments.
            EngineDied: the engine ended.
        """
        while self._process.poll() is None:
            unanswered = contextlib.suppress(OSError, HTTPException)
            with unanswered, self._respond("/health") as response:
                if response.status == HTTPStatus.OK:
                    self.facts = self.ask(FACTS_PATH)
                    return self.facts
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if self._process.returncode == REFUSED:
            text = self.log.read_text(errors="replace")
            raise ValueError(text.rpartition(f"\n{REFUSAL}")[2].rstrip())
        raise EngineDied(self.log)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Get JSON, or post it and get an answer.

        Raises:
            ValueError: the server refused the request.
            EngineDied: the engine ended without answering.
        """
        with self.answer(path, body) as response:
            return json.load(response)

    @contextlib.contextmanager
    def answer(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Yield the response to a request that succeeds; its lines come as they are sent.

        Raises as `ask` does.
        """
        try:
            with self._respond(path, body) as response:
                if response.status == HTTPStatus.OK:
                    yield response
                    return
                refusal = response.read().decode(errors="replace")
        except (OSError, HTTPException):
            raise EngineDied(self.log) from None  # a server that lives answers
        self.refuse(refusal, died=response.status >= HTTPStatus.INTERNAL_SERVER_ERROR)

    def refuse(self, refusal: str, *, died: bool) -> NoReturn:
        """Raise what the server's error says. `died`: it may have, so raise `EngineDied`."""
        with contextlib.suppress(ValueError, LookupError, TypeError):
            refusal = str(json.loads(refusal)["error"]["message"])
        if not died:
            raise ValueError(refusal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_STOP)
            raise EngineDied(self.log)
        raise EngineDied(self.log, refusal)

    def _respond(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        connection = HTTPConnection(HOST, self._port)
        written = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("GET" if body is None else "POST", path, written, headers)
        return connection.getresponse()

    def dismiss(self) -> None:
        """Ask the process to end, without waiting; `__exit__` waits."""
        self._process.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.dismiss()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_STOP)
        finally:  # also if the wait is interrupted
            # vLLM's own processes outlive a server that could not shut them down.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reserved.close()


def flag_names(flags: Iterable[str]) -> set[str]:
    """Return the flags without their values, as vLLM spells them."""
    return {as_vllm_spells(flag).partition("=")[0] for flag in flags if flag.startswith("-")}


def as_vllm_spells(flag: str) -> str:
    """Return a flag with dashes in its name, or a value as it is."""
    name, *value = flag.split("=", 1)
    return "=".join([name.replace("_", "-") if flag.startswith("--") else name, *value])


def other_plugins() -> list[str]:
    """Return the names of all plugins that vLLM would load here, except ours."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        names = {*allowed.split(",")}
    else:
        entries = (one for package in distributions() for one in package.entry_points)
        names = {one.name for one in entries if one.group.startswith("vllm.")}
    return sorted(names - {"dflash"})
