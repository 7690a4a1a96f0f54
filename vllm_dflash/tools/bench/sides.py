"""The engines that are compared. They start side by side where that is safe, and stay so."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from vllm_dflash.tools.engine_answers import Facts
from vllm_dflash.tools.engine_process import EngineProcess
from vllm_dflash.tools.progress import Progress

OURS = "ours"
PLAIN = "plain"
SCHEDULE = "native schedule"
LOOK_UPS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "suffix": {},
}
"""Settings of vLLM's methods; those of suffix are its defaults."""
BLOCKS = "blocks"
PLUGIN, NO_PLUGIN = "dflash", ""
"""Values of VLLM_PLUGINS."""


@dataclass(frozen=True)
class Side:
    """One engine."""

    name: str
    kind: Literal["plain", "native", "native schedule", "ours", "ours fixed", "beside"]
    plugins: str
    speculative_config: dict[str, Any] | None

    @property
    def draft_tokens(self) -> int | None:
        """K where it is fixed."""
        return (self.speculative_config or {}).get("num_speculative_tokens")

    @property
    def draft_length(self) -> str:
        """What tells this side from others of vLLM as it comes, in a few letters."""
        return PLAIN if self.draft_tokens is None else f"K={self.draft_tokens}"

    def start(self, logs: Path, **arguments: Any) -> EngineProcess:
        """Its engine, in a process whose log goes to that folder."""
        return EngineProcess(
            logs / f"{self.name.replace(' ', '-')}.log",
            environment=side_environment(self.plugins),
            speculative_config=self.speculative_config,
            **arguments,
        )


def side_environment(plugins: str | None = None) -> dict[str, str]:
    """Environment of one engine among several; `plugins=""` leaves vllm-dflash out."""
    environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return environment


def make_sides(
    drafter: str,
    native_k: Iterable[int],
    ours_fixed_k: Iterable[int] = (),
    beside: Iterable[str] = (),
) -> list[Side]:
    """Plain decoding, native DFlash at each fixed K, ours: adaptive and at each fixed K; others.

    `beside` are `BLOCKS`, which is ours without free drafts, or methods among `LOOK_UPS`.
    """
    dflash: dict[str, Any] = {"method": "dflash", "model": drafter}
    sides = [Side(PLAIN, "plain", NO_PLUGIN, None)]
    for k in native_k:
        config = dflash | {"num_speculative_tokens": k}
        sides.append(Side(f"native K={k}", "native", NO_PLUGIN, config))
    sides.append(Side(OURS, "ours", PLUGIN, dflash))
    for k in ours_fixed_k:
        config = dflash | {"draft_length": "fixed", "num_speculative_tokens": k}
        sides.append(Side(f"ours K={k}", "ours fixed", PLUGIN, config))
    for name in beside:
        if name == BLOCKS:
            config = dflash | {"free_drafts": "off"}
            sides.append(Side("ours, blocks only", "beside", PLUGIN, config))
        else:
            sides.append(Side(name, "beside", NO_PLUGIN, {"method": name, **LOOK_UPS[name]}))
    return sides


def tuned_schedule(drafter: str, rates: Mapping[int, Mapping[int, float]]) -> Side:
    """Native DFlash with vLLM's own schedule, one K for each number of requests, at its best.

    `rates`: tokens per second by number of requests and K, 0 being plain decoding. The fastest K
    holds from its number of requests to the next one; vLLM takes the last K for all beyond.
    """
    counts = sorted(rates)
    lasts = [*(following - 1 for following in counts[1:]), counts[-1]]
    fastest = [max(rates[count], key=rates[count].__getitem__) for count in counts]
    ranges = zip([1, *counts[1:]], lasts, fastest, strict=True)
    config = {
        "method": "dflash",
        "model": drafter,
        "num_speculative_tokens": max(rates[counts[0]]),
        "num_speculative_tokens_per_batch_size": [[*one] for one in ranges],
    }
    return Side(SCHEDULE, "native schedule", NO_PLUGIN, config)


@dataclass
class SideEngines:
    """One for each side, in processes of their own, until the context ends."""

    arguments: dict[str, Any]
    """Arguments of every engine."""
    at_once: int
    """Engines that may start at the same time."""
    logs: Path
    """A folder."""
    _children: dict[str, EngineProcess] = field(default_factory=dict)

    def start(self, sides: Sequence[Side], progress: Progress) -> list[Facts]:
        """Start an engine for each of these sides, and return what they say about themselves.

        The first one starts alone: that is ours, which times its own costs at the end of its start,
        and nobody may disturb it then.
        """
        waiting = sorted(sides, key=lambda side: side.name != OURS)
        facts: list[Facts] = []
        with progress.stage("starting the engines", len(sides), "engines") as tell:
            while waiting:
                room = self.at_once if self._children else 1
                crowd, waiting = waiting[:room], waiting[room:]
                names, began = ", ".join(side.name for side in crowd), time.monotonic()
                tell(len(facts), f"{names} on the way")
                for side in crowd:
                    self._children[side.name] = side.start(self.logs, **self.arguments)
                    self._children[side.name].send("facts")
                for side in crowd:
                    facts.append(self._children[side.name].receive())
                    tell(len(facts), f"{side.name} is up")
                progress.say(f"up after {time.monotonic() - began:.0f} s: {names}")
        return facts

    def ask(self, name: str, question: str, **arguments: Any) -> Any:
        """Ask the side of that name; see `EngineProcess.ask`."""
        return self._children[name].ask(question, **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for child in self._children.values():
                stack.push(child)
            for child in self._children.values():
                child.dismiss()  # all of them, before the first is waited for
