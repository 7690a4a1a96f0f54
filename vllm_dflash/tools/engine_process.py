"""One vLLM engine in a process of its own, driven by JSON lines over a pair of pipes.

Engines of different kinds can so follow each other or live side by side; an idle one waits for its
input. vLLM's own start cannot be interrupted safely: a Ctrl-C that reaches one of its processes
while that starts leaves the others waiting for it. So all of them live in a session that Ctrl-C
does not reach, and are ended as one: by the command that started them or, where somebody has killed
that, by themselves.
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
from typing import TYPE_CHECKING, Any, Self, cast

from vllm_dflash.tools.engine_answers import SECONDS_TO_CLOSE

if TYPE_CHECKING:
    from vllm_dflash.tools.engine_answers import EngineAnswers

START = "vllm_dflash.tools.engine_answers:EngineAnswers.start"
SECONDS_TO_LEAVE = 2 * SECONDS_TO_CLOSE
SECONDS_TO_STOP = 10.0
"""For a child that is interrupted, because nobody waits for its answer any more, or whose parent is
gone."""
LAST_LINES = 15
"""Lines that are shown of a log without errors."""
ERROR_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:\[rank\d+\]: )?(?:ERROR [^]]*\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Interrupt)(?:: .*)?)$",
    re.MULTILINE,
)
"""The last line of a traceback, with or without what vLLM and PyTorch put before it."""


def errors_in(log: str) -> list[str]:
    """The errors a log names, each of them once: the root cause first, then what it led to."""
    return list(dict.fromkeys(match.group(1) for match in ERROR_LINE.finditer(log)))


class EngineDied(RuntimeError):
    """A child ended before it answered. The message names its errors, the root cause first."""

    def __init__(self, log: Path) -> None:
        """`log` is that of the child; the message says where it lies."""
        text = log.read_text(errors="replace")
        lines = ["an engine died:", *errors_in(text)]
        if len(lines) == 1:
            lines = ["an engine died; the end of its log:", *text.splitlines()[-LAST_LINES:]]
        super().__init__("\n  ".join(lines) + f"\nits log: {log}")


@contextlib.contextmanager
def temporary_logs(prefix: str) -> Iterator[Path]:
    """A folder for logs, which is kept only where an engine died."""
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

    def __init__(
        self,
        log: Path,
        *,
        start: str = START,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Start the process; the engine is ready when it first answers.

        Args:
            log: everything vLLM prints goes to this file.
            start: "module:callable", called in the process with the arguments. What it returns has
                the questions as public methods; `close` is called in the end.
            environment: variables that the process does not share with this one.
            arguments: which JSON can hold; see `EngineAnswers.start`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._busy = True
        """Whether it starts, or is at a question."""
        self._patience = SECONDS_TO_LEAVE
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, start, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | (environment or {}),
                # A group of its own: Ctrl-C is for the command, which ends its children.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout

    @property
    def answers(self) -> EngineAnswers:
        """Asked like the object in the process; arguments are named. Raises as `ask` does."""
        return cast("EngineAnswers", _Asked(self))

    def ask(self, question: str, **arguments: Any) -> Any:
        """Send a question (a method of the answering object) and wait for its answer.

        The first one waits until the engine has started.

        Raises:
            ValueError: the engine refused its arguments (then there is none), or this question.
            EngineDied: there will be no answer.
        """
        self.send(question, **arguments)
        return self.receive()

    def send(self, question: str, **arguments: Any) -> None:
        """The first half of `ask`: whoever has several engines need not wait for each in turn."""
        self._busy = True
        with contextlib.suppress(BrokenPipeError):  # dead already: there is no answer either
            self._questions.write(json.dumps([question, arguments]) + "\n")
            self._questions.flush()

    def receive(self) -> Any:
        """The second half of `ask`; raises what that raises."""
        line = self._answers.readline()
        if not line:
            raise EngineDied(self._log)
        self._busy = False
        message = json.loads(line)
        if "refused" in message:
            raise ValueError(message["refused"])
        return message["answer"]

    def dismiss(self) -> None:
        """It may leave, whatever it does. Several can do so at once; `__exit__` waits for each."""
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        if self._busy:  # nobody waits any more for what it does
            self._busy, self._patience = False, SECONDS_TO_STOP
            self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.dismiss()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._patience)
        finally:  # also when somebody is too impatient to wait
            # vLLM's own processes outlive a child that could not take leave of them.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class _Asked:
    """Every attribute is a question to a process."""

    def __init__(self, process: EngineProcess) -> None:
        self._process = process

    def __getattr__(self, question: str) -> Callable[..., Any]:
        return partial(self._process.ask, question)


def _end_without(parent: int) -> None:
    """An engine that nobody can ask any more would go on holding its memory: end all of them."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(SECONDS_TO_STOP)  # one that is idle sees the end of its input, and takes its leave
    os.killpg(0, signal.SIGKILL)


def serve(start: str, arguments: dict[str, Any]) -> None:
    """Answer until the input ends, a line of JSON each."""
    threading.Thread(target=_end_without, args=[os.getppid()], daemon=True).start()
    # What vLLM prints goes to the log. Processes it starts do not get the duplicate, so the end
    # of the answers' pipe tells the parent that this process died.
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
