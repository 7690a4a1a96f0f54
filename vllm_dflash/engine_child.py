"""One vLLM engine in a process of its own, driven by JSON lines over a pair of pipes.

Engines of different kinds can so follow each other or live side by side; an idle one waits for its
input.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LINES_OF_LOG = 15
SECONDS_TO_LEAVE = 60


class EngineDied(RuntimeError):
    """A child ended before it answered. The message holds the end of its log."""

    def __init__(self, log: Path) -> None:
        last = log.read_text(errors="replace").splitlines()[-LINES_OF_LOG:]
        super().__init__("\n".join([f"an engine died; the end of its log, {log}:", *last]))


class EngineChild:
    """A process that starts an engine and answers questions about it."""

    def __init__(
        self,
        answers: str,
        arguments: Mapping[str, Any],
        log: Path,
        *,
        environment: Mapping[str, str],
    ) -> None:
        """Start the process; the engine is ready when it first answers.

        Args:
            answers: where, "module:callable", what starts the engine is found. It is called in
                the process with these
            arguments: (which JSON can hold) and returns an object whose public methods are the
                questions.
            log: everything vLLM prints goes to this file.
            environment: variables that the process does not share with this one.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._answering = False
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, answers, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | environment,
                # A group of its own: Ctrl-C is for the command, which ends its children.
                start_new_session=True,
            )

    def ask(self, question: str, **arguments: Any) -> Any:
        """Send a question (a method of the answering object) and wait for its answer.

        The first one waits until the engine has started.

        Raises:
            EngineDied: there will be no answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._answering = True
        with contextlib.suppress(BrokenPipeError):  # dead already: there is no answer either
            self._process.stdin.write(json.dumps([question, arguments]) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineDied(self._log)
        self._answering = False
        return json.loads(answer)

    def dismiss(self) -> None:
        """It may leave. Several can do so at the same time; `__exit__` waits for each."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.dismiss()
            if self._answering:  # nobody waits for the answer any more
                self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS_TO_LEAVE)
        finally:  # also when somebody is too impatient to wait
            # vLLM's own processes outlive a child that could not take leave of them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve(answers: str, arguments: dict[str, Any]) -> None:
    """Answer until the input ends."""
    # What vLLM prints goes to the log. Processes it spawns do not inherit the duplicate, so the
    # end of the answers' pipe tells the parent that this process died.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = answers.partition(":")
    known = getattr(importlib.import_module(module), name)(**arguments)
    for line in sys.stdin:
        question, details = json.loads(line)
        answer = getattr(known, question)(**details)
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
