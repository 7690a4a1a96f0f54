"""The servers to compare. They start at the same time if that is safe, and all stay up."""

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

from vllm_dflash.tools.progress import Progress
from vllm_dflash.tools.server import Server, flag_names
from vllm_dflash.tools.server_process import Facts

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
CACHE_SIZE = "--kv-cache-memory-bytes"


@dataclass(frozen=True)
class Side:
    """A server to compare."""

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
        self,
        logs: Path,
        model: str,
        flags: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        **more: Any,
    ) -> Server:
        """Start its server, without waiting for it.

        `environment`: further variables. `more`: further arguments of `Server`.
        """
        variables: dict[str, str | None] = {"VLLM_PLUGINS": self.plugins}
        if CACHE_SIZE in flag_names(flags):  # on CPUs the variable would override the flag
            variables["VLLM_CPU_KVCACHE_SPACE"] = None
        elif "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
        return Server(
            logs / f"{self.name.replace(' ', '-').replace('/', '-')}.log",
            model,
            flags,
            speculative_config=self.speculative_config,
            environment=variables | {**environment},
            **more,
        )


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
        if count > 1:  # servers and results are found by name
            raise ValueError(f"--beside names {name!r} {count} times: leave all but one out.")
    return sides


@dataclass
class SideServers:
    """One server per side, until the context ends."""

    model: str
    flags: list[str]
    """Flags of every `vllm serve`."""
    at_once: int
    """Servers that may start at the same time."""
    logs: Path
    """Folder for the servers' logs."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of every server, besides those of its side."""
    _servers: dict[str, Server] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self, sides: Sequence[Side], progress: Progress) -> list[Facts]:
        """Start a server for each side. Returns facts in the order in which servers started.

        Ours starts first and alone, because it times its costs at the end of its start and must not
        be disturbed.
        """
        waiting = sorted(sides, key=lambda side: side.name != OURS)
        facts: list[Facts] = []
        with progress.stage("starting the servers", len(sides), "servers") as tell:
            while waiting:
                room = self.at_once if self._servers else 1
                crowd, waiting = waiting[:room], waiting[room:]
                names, began = ", ".join(side.name for side in crowd), time.monotonic()
                tell(len(facts), f"waiting for {names}")
                for side in crowd:
                    one = side.start(self.logs, self.model, self.flags, self.environment)
                    self._servers[side.name] = self._stack.enter_context(one)
                for side in crowd:
                    facts.append(self._servers[side.name].wait())
                    tell(len(facts), f"{side.name} is up")
                progress.say(f"up after {time.monotonic() - began:.0f} s: {names}")
        return facts

    def __getitem__(self, name: str) -> Server:
        return self._servers[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        for server in self._servers.values():
            server.dismiss()  # all, before waiting for the first
        self._stack.close()
