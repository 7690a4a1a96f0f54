"""The engines that are compared."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OURS = "ours"
PLAIN = "plain"
SCHEDULE = "native schedule"
LOOK_UPS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 7, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "suffix": {},
}
"""Settings of vLLM's methods; those of suffix are its defaults."""
PLUGIN, NO_PLUGIN = "dflash", ""
"""Values of VLLM_PLUGINS."""


@dataclass(frozen=True)
class Side:
    """One engine."""

    name: str
    kind: Literal["plain", "native", "native schedule", "text", "ours", "ours fixed", "blocks"]
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


def side_environment(plugins: str | None = None) -> dict[str, str]:
    """Of one engine of several that live side by side; `plugins=""` leaves vllm-dflash out."""
    environment = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return environment


def schedule_side(drafter: str, ranges: Sequence[Sequence[int]], longest: int) -> Side:
    """Native DFlash whose K depends on how many requests there are.

    Args:
        drafter: folder or repository.
        ranges: (first, last, K) in numbers of requests, as vLLM's option has them; 0: no drafts.
        longest: no K is longer.
    """
    config = {
        "method": "dflash",
        "model": drafter,
        "num_speculative_tokens": longest,
        "num_speculative_tokens_per_batch_size": [[*one] for one in ranges],
    }
    return Side(SCHEDULE, "native schedule", NO_PLUGIN, config)


def side_beside(name: str, drafter: str) -> Side:
    """Ours without free drafts, or a method of vLLM's that looks drafts up in the text."""
    if name == "blocks":
        config = {"method": "dflash", "model": drafter, "free_drafts": "off"}
        return Side("ours, blocks only", "blocks", PLUGIN, config)
    config = {"method": name, **LOOK_UPS[name]}
    return Side(name, "text", NO_PLUGIN, config)


def make_sides(
    drafter: str,
    native_k: Iterable[int],
    ours_fixed_k: Iterable[int],
    beside: Iterable[str] = (),
) -> list[Side]:
    """Plain decoding, native DFlash at each fixed K, ours: adaptive and at each fixed K; others."""
    dflash = {"method": "dflash", "model": drafter}
    natives = [
        Side(f"native K={k}", "native", NO_PLUGIN, dflash | {"num_speculative_tokens": k})
        for k in native_k
    ]
    fixed = [
        Side(
            f"ours K={k}",
            "ours fixed",
            PLUGIN,
            dflash | {"draft_length": "fixed", "num_speculative_tokens": k},
        )
        for k in ours_fixed_k
    ]
    plain = Side(PLAIN, "plain", NO_PLUGIN, None)
    more = [side_beside(name, drafter) for name in beside]
    return [plain, *natives, Side(OURS, "ours", PLUGIN, dflash), *fixed, *more]
