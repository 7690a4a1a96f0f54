"""Runs one vLLM engine in its own process, driven by JSON lines over a pair of pipes.

This lets a command run different engines one after the other or side by side; an idle engine waits
for input. vLLM's start cannot be interrupted safely: if Ctrl-C reaches one of its processes during
its start, the others wait for it forever. So an engine's processes are in their own session, which
Ctrl-C does not reach. They end together: the command ends them or, if the command was killed, they
end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

from vllm_dflash.tools.engine_answers import SECONDS_TO_CLOSE

if TYPE_CHECKING:
    from vllm_dflash.tools.engine_answers import EngineAnswers

START = "vllm_dflash.tools.engine_answers:EngineAnswers.start"
SECONDS_TO_STOP = 10.0
"""For a child whose answer is no longer wanted, or whose parent is gone."""
LAST_LINES = 15
"""Lines shown from the end of a log without errors."""
ERROR_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:\[rank\d+\]: )?(?:ERROR [^]]*\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$",
    re.MULTILINE,
)
"""The last line of a traceback, with or without the prefixes of vLLM and PyTorch."""


class EngineDied(RuntimeError):
    """A child ended before it answered. The message lists its errors, the root cause first."""

    def __init__(self, log: Path) -> None:
        """`log`: the child's log, which the message points to."""
        text = log.read_text(errors="replace")
        lines = ["an engine died:", *dict.fromkeys(ERROR_LINE.findall(text))]
        if len(lines) == 1:
            lines = ["an engine died; the end of its log:", *text.splitlines()[-LAST_LINES:]]
        super().__init__("\n  ".join(lines) + f"\nits log: {log}")


@contextlib.contextmanager
def temporary_logs(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for logs; it is kept only if an engine died."""
    folder, is_kept = Path(tempfile.mkdtemp(prefix=prefix)), False
    try:
        yield folder
    except EngineDied:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


class EngineProcess:
    """A process that starts an engine and answers questions about it."""

    launch: Callable[..., subprocess.Popen[str]] = staticmethod(subprocess.Popen)
    """What starts a process, if not `subprocess.Popen`."""

    def __init__(
        self,
        log: Path,
        *,
        start: str = START,
        environment: Mapping[str, str | None] = MappingProxyType({}),
        **arguments: Any,
    ) -> None:
        """Start the process; the engine is ready when it first answers.

        Args:
            log: file for everything that vLLM prints.
            start: "module:callable", called in the process with the arguments. Public methods of
                the object it returns are the questions; its `close` is called at the end.
            environment: variables to set for the process, or None to unset one; the others are
                this process's.
            arguments: JSON values; see `EngineAnswers.start`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._busy = True
        """Whether the engine is starting or answering."""
        self._patience = 2 * SECONDS_TO_CLOSE
        variables = {**os.environ, **environment}
        with log.open("w") as file:
            self._process = self.launch(
                [sys.executable, "-m", __name__, start, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={name: value for name, value in variables.items() if value is not None},
                # Ctrl-C must reach only the command, which then ends its children.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    @property
    def answers(self) -> EngineAnswers:
        """A proxy of the object in the process; pass arguments by name. Raises as `ask` does."""
        return cast("EngineAnswers", _Asked(self))

    def ask(self, question: str, **arguments: Any) -> Any:
        """Send a question (a method of the answering object) and wait for its answer.

        The first one waits until the engine has started.

        Raises:
            ValueError: the engine refused its arguments and did not start, or refused the question.
            EngineDied: the engine ended without answering.
        """
        self.send(question, **arguments)
        return self.receive()

    def send(self, question: str, **arguments: Any) -> None:
        """Send a question without waiting, for callers with several engines; then `receive`."""
        self._busy = True
        with contextlib.suppress(BrokenPipeError):  # already dead; `receive` will say so
            self._questions.write(json.dumps([question, arguments]) + "\n")
            self._questions.flush()

    def receive(self) -> Any:
        """Wait for the answer to `send`. Raises as `ask` does."""
        line = self._answers.readline()
        if not line:
            raise EngineDied(self._log)
        self._busy = False
        message = json.loads(line)
        if "refused" in message:
            raise ValueError(message["refused"])
        return message["answer"]

    def dismiss(self) -> None:
        """Ask the process to exit, without waiting; `__exit__` waits."""
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        if self._busy:  # its answer is no longer wanted
            self._busy, self._patience = False, SECONDS_TO_STOP
            self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.dismiss()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience)
        finally:  # also if the wait is interrupted
            # vLLM's own processes outlive a child that could not shut them down.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class _Asked:
    """Proxy on which every attribute is a question to a process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def __getattr__(self, question: str) -> Callable[..., Any]:
        return partial(self._process.ask, question)


def _end_without(parent: int) -> None:
    """End this engine's processes when the parent is gone, so that they do not keep its memory."""
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
        try:
            answer = getattr(known, question)(**details)
        except ValueError as error:
            traceback.print_exc()
            tell("refused", str(error))
        else:
            tell("answer", answer)
    known.close()


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
