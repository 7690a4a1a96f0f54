"""The engines to compare. They start at the same time if that is safe, and all stay up."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress

OURS = "ours"
PLAIN = "plain"
LOOK_UPS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "suffix": {},
}
"""Settings of vLLM's look-up methods; suffix uses vLLM's defaults."""
BLOCKS = "blocks"
PLUGIN, NO_PLUGIN = "dflash", ""
"""Values of VLLM_PLUGINS."""


@dataclass(frozen=True)
class Side:
    """An engine to compare."""

    name: str
    kind: Literal["plain", "native", "native schedule", "ours", "beside"]
    plugins: str
    speculative_config: dict[str, Any] | None

    @property
    def draft_tokens(self) -> int | None:
        """K if it is fixed, otherwise None."""
        return (self.speculative_config or {}).get("num_speculative_tokens")

    @property
    def draft_length(self) -> str:
        """Short label, to tell plain decoding and native DFlash with different K apart."""
        return PLAIN if self.draft_tokens is None else f"K={self.draft_tokens}"

    def start(
        self, logs: Path, environment: Mapping[str, str] = MappingProxyType({}), **arguments: Any
    ) -> EngineProcess:
        """Start the engine in a process that logs to a file in `logs`.

        `environment`: variables besides those of `side_environment`. `arguments`: see
        `EngineProcess`.
        """
        variables: dict[str, str | None] = {**side_environment(self.plugins), **environment}
        if "kv_cache_memory_bytes" in arguments:  # on CPUs the variable would override it
            variables["VLLM_CPU_KVCACHE_SPACE"] = None
        return EngineProcess(
            logs / f"{self.name.replace(' ', '-').replace('/', '-')}.log",
            environment=variables,
            speculative_config=self.speculative_config,
            **arguments,
        )


def side_environment(plugins: str | None = None) -> dict[str, str]:
    """Return variables for one of several engines. `plugins`: VLLM_PLUGINS; None: unchanged."""
    environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return environment


def make_sides(drafter: str, native_k: Iterable[int], beside: Iterable[str] = ()) -> list[Side]:
    """Make the sides: plain, native DFlash at each fixed K, ours, others.

    `beside`: `BLOCKS` (ours without free drafts), methods in `LOOK_UPS`, and JSON of our options.

    Raises:
        ValueError: two sides have the same name.
    """
    dflash: dict[str, Any] = {"method": "dflash", "model": drafter}
    sides = [Side(PLAIN, "plain", NO_PLUGIN, None)]
    for k in native_k:
        config = dflash | {"num_speculative_tokens": k}
        sides.append(Side(f"native K={k}", "native", NO_PLUGIN, config))
    # Without `require`, native would run what ours cannot, and be measured under our name.
    ours = dflash | {"require": True}
    sides.append(Side(OURS, "ours", PLUGIN, ours))
    for name in beside:
        if name in LOOK_UPS:
            sides.append(Side(name, "beside", NO_PLUGIN, {"method": name, **LOOK_UPS[name]}))
            continue
        if name == BLOCKS:
            called, options = "blocks only", {"free_drafts": "off"}
        else:
            options = json.loads(name)
            called = ", ".join(f"{key} {value}" for key, value in options.items())
        sides.append(Side(f"ours, {called}", "beside", PLUGIN, ours | options))
    for name, count in Counter(side.name for side in sides).items():
        if count > 1:  # engines and results are found by name
            raise ValueError(f"--beside names {name!r} {count} times: leave all but one out.")
    return sides


@dataclass
class SideEngines:
    """One engine per side, each in its own process, until the context ends."""

    arguments: dict[str, Any]
    """Arguments of every engine and of its process; see `Side.start`."""
    at_once: int
    """Engines that may start at the same time."""
    logs: Path
    """Folder for the engines' logs."""
    _children: dict[str, EngineProcess] = field(default_factory=dict)

    def start(self, sides: Sequence[Side], progress: Progress) -> list[Facts]:
        """Start an engine for each side. Returns facts in the order in which engines started.

        Ours starts first and alone, because it times its costs at the end of its start and must not
        be disturbed.
        """
        waiting = sorted(sides, key=lambda side: side.name != OURS)
        facts: list[Facts] = []
        with progress.stage("starting the engines", len(sides), "engines") as tell:
            while waiting:
                room = self.at_once if self._children else 1
                crowd, waiting = waiting[:room], waiting[room:]
                names, began = ", ".join(side.name for side in crowd), time.monotonic()
                tell(len(facts), f"waiting for {names}")
                for side in crowd:
                    self._children[side.name] = side.start(self.logs, **self.arguments)
                    self._children[side.name].send("facts")
                for side in crowd:
                    facts.append(self._children[side.name].receive())
                    tell(len(facts), f"{side.name} is up")
                progress.say(f"up after {time.monotonic() - began:.0f} s: {names}")
        return facts

    def ask(self, name: str, question: str, **arguments: Any) -> Any:
        """Ask the engine of the side with this name; see `EngineProcess.ask`."""
        return self._children[name].ask(question, **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for child in self._children.values():
                stack.push(child)
            for child in self._children.values():
                child.dismiss()  # dismiss all before waiting for the first
