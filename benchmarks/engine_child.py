"""Runs an engine in a process of its own, for what needs more of it than a server gives.

The process answers JSON lines over a pair of pipes. Ctrl-C does not reach it (vLLM's start cannot
be interrupted safely), and it ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from vllm_dflash.tools.server import EngineDied

SECONDS_TO_STOP = 10.0
"""For a child whose answer is no longer wanted, or whose parent is gone."""
SECONDS_TO_CLOSE = 60.0


class EngineChild:
    """A process that starts an engine and answers questions about it."""

    def __init__(
        self,
        log: Path,
        start: str = "stepped_engine:SteppedEngine.start",
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        """Start the process; the engine is ready when it first answers.

        Args:
            log: file for everything that vLLM prints.
            start: "module:callable", called in the process with the arguments. Public methods of
                the object it returns are the questions; its `close` is called at the end.
            environment: variables to set for the process; the others are this process's.
            arguments: JSON values.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._is_busy = True
        """Whether the engine is starting or answering."""
        here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, start, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "PYTHONPATH": here, **environment},
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    def __getattr__(self, question: str) -> Any:
        """Return a method that asks this question; pass arguments by name."""
        return partial(self.ask, question)

    def ask(self, question: str, **arguments: Any) -> Any:
        """Send a question (a method of the answering object) and wait for its answer.

        Raises:
            ValueError: the engine refused its arguments, and did not start.
            EngineDied: the engine ended without answering.
        """
        self.send(question, **arguments)
        return self.receive()

    def send(self, question: str, **arguments: Any) -> None:
        """Send a question without waiting, for callers with several engines; then `receive`."""
        self._is_busy = True
        with contextlib.suppress(BrokenPipeError):  # already dead; `receive` will say so
            self._questions.write(json.dumps([question, arguments]) + "\n")
            self._questions.flush()

    def receive(self) -> Any:
        """Wait for the answer to `send`. Raises as `ask` does."""
        line = self._answers.readline()
        if not line:
            raise EngineDied(self._log)
        self._is_busy = False
        message = json.loads(line)
        if "refused" in message:
            raise ValueError(message["refused"])
        return message["answer"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            with contextlib.suppress(BrokenPipeError):
                self._questions.close()
            if self._is_busy:
                self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_STOP if self._is_busy else SECONDS_TO_CLOSE)
        finally:  # also if the wait is interrupted
            # vLLM's own processes outlive a child that could not shut them down.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(SECONDS_TO_STOP)  # an idle engine sees the end of its input and exits by itself
    os.killpg(0, signal.SIGKILL)


def serve(start: str, arguments: dict[str, Any]) -> None:
    """Answer questions until the input ends, with one line of JSON each."""
    threading.Thread(target=_end_without, args=[os.getppid()], daemon=True).start()
    # What vLLM prints goes to the log. Its processes do not inherit the duplicated pipe, so the
    # end of the pipe tells the parent that this process died.
    pipe = os.dup(sys.stdout.fileno())
    os.register_at_fork(after_in_child=lambda: os.close(pipe))
    output = os.fdopen(pipe, "w", closefd=False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(kind: str, value: Any) -> None:
        print(json.dumps({kind: value}), file=output, flush=True)

    try:
        known = pkgutil.resolve_name(start)(**arguments)
    except ValueError as error:
        traceback.print_exc()
        tell("refused", str(error))
        return
    for line in sys.stdin:
        question, details = json.loads(line)
        tell("answer", getattr(known, question)(**details))
    known.close()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
