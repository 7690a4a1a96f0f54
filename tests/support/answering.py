"""Replaces an engine in a child process: no vLLM, but what can go wrong with it."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from pathlib import Path

ROOT_CAUSE = "(Worker pid=7) ERROR 11-21 09:10:00 [mp.py:8] weights.LoadError: too short"


def start(
    folder: str, refusal: str | None = None, hangs: bool = False, patience: float | None = None
) -> Answers:
    if patience is not None:
        vars(sys.modules["__main__"])["SECONDS_TO_STOP"] = patience
    answers = Answers(Path(folder))
    if refusal is not None:
        raise ValueError(refusal)
    if hangs:
        answers.hang()
    return answers


class Answers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def double(self, number: int) -> int:
        print("printed while answering")
        return 2 * number

    def refuse(self, why: str) -> None:
        raise ValueError(why)

    def fail(self) -> None:
        print(ROOT_CAUSE, file=sys.stderr)
        raise RuntimeError("Engine core initialization failed.")

    def leave(self) -> None:
        """Die without an error."""
        print("last words")
        sys.exit(3)

    def start_process(self) -> None:
        """Start a process that only SIGKILL ends; its parent waits for it when exiting."""
        multiprocessing.get_context("fork").Process(target=_stay).start()

    def hang(self) -> None:
        self.start_process()
        (self._folder / "hanging").touch()
        while True:  # a signal that comes right before a sleep is only seen after it
            time.sleep(0.1)

    def close(self) -> None:
        (self._folder / "closed").touch()


def _stay() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
