"""The engine in a process of its own, so that it ends with the comparison, however that ends.

vLLM's own start cannot be interrupted safely: a Ctrl-C that reaches one of its processes while
that starts leaves the others waiting for it. So all of them live in a session that Ctrl-C does
not reach, and are ended as one. Models that vLLM patches (`model_impl`) are the child's, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_dflash.parity.engine_side import EngineSide, Prompt, Written, record_prompts

SECONDS_TO_LEAVE, SECONDS_TO_DIE = 20.0, 10.0
ERROR_LINE = re.compile(
    r"^(?:\(\w+ pid=\d+\) ERROR [^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$",
    re.MULTILINE,
)
"""The last line of a traceback, with or without what vLLM puts before its log's lines."""


class EngineFailed(RuntimeError):
    """The engine ended without a result. The message says why."""


def record_in_child(
    engine: dict[str, Any],
    prompts: Sequence[Prompt],
    tokens: int,
    folder: Path,
    on_progress: Callable[[str], None],
) -> EngineSide:
    """Start an engine with these arguments, record the prompts, and end it.

    Raises:
        ValueError: the engine refused its arguments, the pair or a prompt.
        EngineFailed: it ended for another reason.
    """
    log = folder / "engine.log"
    job = {"engine": engine, "prompts": prompts, "tokens": tokens, "folder": str(folder)}
    with log.open("w") as file, _child(file.fileno()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(job))
        child.stdin.close()
        for line in child.stdout:
            message = json.loads(line)
            if "progress" in message:
                on_progress(message["progress"])
            elif "refused" in message:
                raise ValueError(message["refused"])
            else:
                return Written(**message["written"]).load(folder)
    raise EngineFailed(_what_failed(log))


def _what_failed(log: Path) -> str:
    """The errors a log names, the root cause first, and where a copy of all of it lies."""
    text = log.read_text(errors="replace")
    descriptor, kept = tempfile.mkstemp(prefix="vllm-dflash-parity-", suffix=".log")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    errors = dict.fromkeys(match.group(1) for match in ERROR_LINE.finditer(text))
    return "\n  ".join(["the engine failed:", *errors, f"its log: {kept}"])


@contextlib.contextmanager
def _child(log: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={"VLLM_LOGGING_LEVEL": "WARNING"} | os.environ,
        start_new_session=True,
    ) as child:
        patience = SECONDS_TO_LEAVE
        try:
            yield child
        except BaseException:
            child.send_signal(signal.SIGINT)  # nobody waits for its result any more
            patience = SECONDS_TO_DIE
            raise
        finally:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(patience)
            finally:
                # Itself, if it still runs, and what it could not take leave of.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)


def main(job: dict[str, Any]) -> None:
    """Record, and write a line of JSON for every event."""
    # What vLLM prints goes to the log. Processes it spawns do not inherit the duplicate, so the
    # pipe ends with this process.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(event: str, value: Any) -> None:
        print(json.dumps({event: value}), file=events, flush=True)

    from vllm import LLM

    try:
        llm = LLM(**job["engine"])
        written = record_prompts(
            llm,
            job["prompts"],
            job["tokens"],
            Path(job["folder"]),
            lambda text: tell("progress", text),
        )
    except ValueError as error:
        tell("refused", str(error))
        return
    tell("written", asdict(written))
    # vLLM's own limit is 5 s; what it kills then leaves shared memory behind.
    llm.llm_engine.engine_core.shutdown(timeout=SECONDS_TO_LEAVE / 2)


if __name__ == "__main__":
    main(json.load(sys.stdin))
