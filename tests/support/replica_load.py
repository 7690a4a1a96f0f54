"""Clients that keep replicas busy while one of them is killed, and the answers they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import psutil

from support.waiting import PATIENCE_S

TOKENS = 160


@dataclass
class Asked:
    """One request, from its beginning to its end, as its client saw it."""

    prompt: int
    is_stream: bool
    began: float
    served_by: int | None = None
    """Process id of the replica, once it has begun to answer."""
    text: str = ""
    error: openai.OpenAIError | None = None
    ended: float = float("inf")

    def spans(self, moment: float) -> bool:
        return self.began < moment < self.ended


@dataclass
class Load:
    client: openai.OpenAI
    model: str
    prompts: list[str]
    asked: list[Asked] = field(default_factory=list)

    def ask(self, number: int, stop: threading.Event) -> None:
        """Send request after request; clients with even numbers stream."""
        while not stop.is_set():
            one = Asked(number, is_stream=number % 2 == 0, began=time.monotonic())
            self.asked.append(one)
            try:
                self.answer(one)
            except openai.OpenAIError as error:
                one.error = error
            one.ended = time.monotonic()

    def answer(self, one: Asked) -> None:
        raw = self.client.completions.with_raw_response.create(
            model=self.model,
            prompt=self.prompts[one.prompt],
            max_tokens=TOKENS,
            temperature=0.0,
            stream=one.is_stream,
            extra_body={"ignore_eos": True},
        )
        one.served_by = served_by(raw.headers)
        answer: Any = raw.parse()
        if one.is_stream:
            for chunk in answer:
                one.text += chunk.choices[0].text
        else:
            one.text = answer.choices[0].text

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Run a client for each prompt, all at once."""
        stop = threading.Event()
        clients = [
            threading.Thread(target=self.ask, args=(number, stop))
            for number in range(len(self.prompts))
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stop.set()
            for client in clients:
                client.join(PATIENCE_S)
                assert not client.is_alive(), "a request never ended"

    def streams_in_flight(self) -> list[Asked]:
        """Return the streams whose answers have begun."""
        return [
            one for one in self.asked if one.is_stream and one.text and one.spans(time.monotonic())
        ]

    def finished_after(self, moment: float) -> int:
        return sum(one.began > moment and one.ended < float("inf") for one in self.asked)


def served_by(headers: Mapping[str, str]) -> int:
    """Return the process id of the replica that an answer is from."""
    return int(headers["x-served-by"].split("/")[1])


def of_kind(processes: list[psutil.Process], kind: str) -> list[psutil.Process]:
    found = []
    for process in processes:
        try:
            if kind in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found
