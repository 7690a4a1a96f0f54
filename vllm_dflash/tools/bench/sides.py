"""The servers to compare."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vllm_dflash.tools.server import Server, flag_names, other_plugins

OURS = "ours"
PLAIN = "plain"
LOOK_UPS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "suffix": {},
}
"""Settings of vLLM's look-up methods; suffix uses vLLM's defaults."""
BLOCKS = "blocks"
PLUGIN, NO_PLUGIN = "dflash", ""
"""What a server loads besides other packages' plugins."""
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
        plugins = [*other_plugins(), *filter(None, [self.plugins])]
        variables: dict[str, str | None] = {"VLLM_PLUGINS": ",".join(plugins)}
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
