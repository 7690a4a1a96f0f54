"""Medians and paired ratios of what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.tools.bench.sides import Side

Rounds = npt.NDArray[np.float64]
"""One value per round. Rounds of different sides are pairs: divide first, then take the median."""


def tokens_rate(result: dict[str, Any]) -> float:
    """Tokens per second of one result."""
    return float(result["tokens_per_second"])


@dataclass(frozen=True)
class Spread:
    """A median, and how far the rounds lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Rounds) -> Spread:
        """Of one value per round."""
        return cls(float(np.median(rounds)), float(rounds.min()), float(rounds.max()))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


class Results:
    """Measurements by load, setting and side."""

    def __init__(self, sides: list[Side], measurements: Iterable[dict[str, Any]]) -> None:
        self.sides = sides
        self._results: dict[tuple[str, float | None, str], list[dict[str, Any]]] = defaultdict(list)
        for one in measurements:
            self._results[one["load"], one["setting"], one["side"]].append(one["result"])

    @property
    def loads(self) -> list[str]:
        """Loads that were measured, in order."""
        return list(dict.fromkeys(load for load, _, _ in self._results))

    @property
    def plain(self) -> Side:
        """The side without drafts."""
        return next(side for side in self.sides if side.kind == "plain")

    @property
    def natives(self) -> list[Side]:
        """Sides on which vLLM's own DFlash drafts."""
        return [side for side in self.sides if side.kind == "native"]

    @property
    def baselines(self) -> list[Side]:
        """vLLM as it comes: plain decoding and the natives."""
        return [self.plain, *self.natives]

    @property
    def beside(self) -> list[Side]:
        """Sides that were asked for besides: look-ups of vLLM's, and ours without them."""
        return [side for side in self.sides if side.kind in ("text", "blocks")]

    @property
    def fixed(self) -> list[Side]:
        """Sides that do the same at any concurrency."""
        return [
            side for side in self.sides if side.kind not in ("ours", "blocks", "native schedule")
        ]

    @property
    def others(self) -> list[Side]:
        """All but ours."""
        return [side for side in self.sides if side.kind != "ours"]

    @property
    def schedule(self) -> Side | None:
        """vLLM's own DFlash with a K for each number of requests, if it was measured."""
        return next((side for side in self.sides if side.kind == "native schedule"), None)

    def settings(self, load: str) -> list[float | None]:
        """Concurrencies or rates of a load, in order."""
        return list(dict.fromkeys(setting for one, setting, _ in self._results if one == load))

    def rounds(
        self, load: str, setting: float | None, side: str, value: Callable[[dict[str, Any]], Any]
    ) -> Rounds:
        """A value of each round's result, [rounds]; [rounds, n] where the value is a list."""
        return np.array([value(result) for result in self._results[load, setting, side]])

    def throughput(self, load: str, setting: float | None, side: str) -> Rounds:
        """Tokens per second of each round."""
        return self.rounds(load, setting, side, tokens_rate)

    def fastest(self, load: str, setting: float | None, sides: Iterable[Side]) -> Side:
        """The side with the highest median throughput."""
        return max(sides, key=lambda side: np.median(self.throughput(load, setting, side.name)))
