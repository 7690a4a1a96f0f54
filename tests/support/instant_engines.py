"""Engines of a comparison that answer at once, and record what they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_dflash.tools.engine_process import EngineProcess

Question = tuple[str, str, dict[str, Any]]
"""Side, question, arguments."""
NOTHING_MORE: Mapping[str, Callable[[dict[str, Any]], Any]] = MappingProxyType({})


def of(asked: list[Question], question: str) -> list[Question]:
    """What was asked with this question."""
    return [one for one in asked if one[1] == question]


def recording_processes(
    questions: list[Question], more: Mapping[str, Callable[[dict[str, Any]], Any]] = NOTHING_MORE
) -> type[EngineProcess]:
    """Make a class of processes that add each question to the list.

    `more`: answers to other questions, or instead of these, by their arguments.
    """

    class InstantProcess(EngineProcess):
        def __init__(self, log: Path, *, environment: dict[str, str], **arguments: Any) -> None:
            self.side = log.stem.replace("-", " ")
            self.stats = {"plugins": environment["VLLM_PLUGINS"], "arguments": arguments}
            questions.append((self.side, "start", self.stats))

        def __exit__(self, *error: object) -> None:
            questions.append((self.side, "leave", {}))

        def dismiss(self) -> None:
            pass

        def send(self, question: str, **arguments: Any) -> None:
            questions.append((self.side, question, arguments))
            self.pending = question, arguments

        def receive(self) -> Any:
            question, arguments = self.pending
            if question in more:
                return more[question](arguments)
            match question:
                case "facts":
                    room = 1000 if self.side == "plain" else 900  # less beside a drafter's cache
                    facts = {"versions": {"vllm": "1.2.3"}, "cache_tokens": room}
                    return facts | {"max_model_len": 20}
                case "encode":
                    return [[ord(letter) for letter in text] for text in arguments["texts"]]
                case "dflash_stats":
                    return [self.stats]
                case "closed":
                    count = arguments["concurrency"]
                    best = count == (1 if self.side == "native K=3" else 4)
                    return {"tokens_per_second": 100.0 * count + best}
                case "answers":
                    answers = arguments["answers"]
                    waits: dict[str, list[Any]]
                    waits = {"first_token_seconds": [1.0, 3.0], "token_seconds": [0.5]}
                    seen = {"seconds": [1.0, 2.0], "tokens": [1, 3]}
                    waits["requests"] = [
                        {"category": one, **seen} for one in arguments.get("categories", ())
                    ]
                    return {"tokens": sum(answers), "tokens_per_second": 28.0, **waits}
                case _:
                    raise KeyError(question)

    return InstantProcess
