"""An engine of the gate that runs in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from vllm_dflash.tools.engine_process import EngineChild
from vllm_dflash.tools.verify.gate_engine import Engine, Facts, Finished, Request

START = "vllm_dflash.tools.verify.stepped_engine:start"
OUR_PLUGIN = "dflash"


@dataclass(frozen=True)
class EngineArguments:
    """What both engines are started with, beside the speculative config."""

    target: str
    dtype: str | None = None
    flags: tuple[str, ...] = field(default=())
    """Of `vllm serve`."""


@contextmanager
def open_child(
    arguments: EngineArguments, speculative_config: dict[str, Any] | None, log: Path
) -> Iterator[Engine]:
    """An engine with this speculative config; without one, and without our plugin, a plain one.

    Raises:
        ValueError: (also later) the engine refused its arguments.
        EngineDied: (also later) it did.
    """
    started_with = {
        "target": arguments.target,
        "speculative_config": speculative_config,
        "dtype": arguments.dtype,
        "flags": list(arguments.flags),
    }
    environment = {} if speculative_config else {"VLLM_PLUGINS": ",".join(other_plugins())}
    with EngineChild(START, started_with, log, environment=environment) as child:
        yield ChildEngine(child)


def other_plugins() -> list[str]:
    """All plugins that this environment would load, but ours: platforms and models, maybe."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None:
        names = {*allowed.split(",")}
    else:
        entries = (one for package in distributions() for one in package.entry_points)
        names = {one.name for one in entries if one.group.startswith("vllm.")}
    return sorted(names - {OUR_PLUGIN})


class ChildEngine:
    """`Engine`, asked through a pipe."""

    def __init__(self, child: EngineChild) -> None:
        self._child = child

    def facts(self) -> Facts:
        """See `Engine`."""
        return Facts(**self._child.ask("facts"))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """See `Engine`."""
        return self._child.ask("encode", texts=texts)

    def decode(self, tokens: list[int]) -> list[str]:
        """See `Engine`."""
        return self._child.ask("decode", tokens=tokens)

    def submit(self, requests: Sequence[Request], concurrency: int) -> None:
        """See `Engine`."""
        self._child.ask("submit", requests=requests, concurrency=concurrency)

    def advance(self, seconds: float) -> list[Finished]:
        """See `Engine`."""
        return [Finished(*one) for one in self._child.ask("advance", seconds=seconds)]

    def counts(self) -> dict[str, float]:
        """See `Engine`."""
        return self._child.ask("counts")
