"""Medians and paired ratios of what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.tools.bench.bench_plan import SWING
from vllm_dflash.tools.bench.sides import Side

Result = dict[str, Any]
Setting = str | float | None
Rounds = npt.NDArray[np.float64]
"""One value per round. Rounds of different sides are pairs: divide first, then take the median."""


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
        self._results: dict[tuple[str, Setting, str], list[Result]] = defaultdict(list)
        for one in measurements:
            load, side, result = one["load"], one["side"], one["result"]
            if load == SWING:  # each phase is a setting of its own
                phases = zip(result["concurrency"], result["tokens_per_second"], strict=True)
                for number, (count, rate) in enumerate(phases, 1):
                    setting = f"{number}: {count}"
                    self._results[load, setting, side].append({"tokens_per_second": rate})
            else:
                self._results[load, one["setting"], side].append(result)

    @property
    def loads(self) -> list[str]:
        """Loads that were measured, in order."""
        return list(dict.fromkeys(load for load, _, _ in self._results))

    def of_kind(self, *kinds: str) -> list[Side]:
        """Sides of these kinds, in order."""
        return [side for side in self.sides if side.kind in kinds]

    def settings(self, load: str) -> list[Setting]:
        """Concurrencies, phases, rates or contexts of a load, in order."""
        return list(dict.fromkeys(setting for one, setting, _ in self._results if one == load))

    def rounds(
        self, load: str, setting: Setting, side: str, value: Callable[[Result], float]
    ) -> Rounds:
        """A value of each round's result."""
        return np.array([value(result) for result in self._results[load, setting, side]])

    def throughput(self, load: str, setting: Setting, side: str) -> Rounds:
        """Tokens per second of each round."""
        return self.rounds(load, setting, side, tokens_rate)

    def fastest(self, load: str, setting: Setting, sides: Iterable[Side]) -> Side:
        """The side with the highest median throughput."""
        return max(sides, key=lambda side: np.median(self.throughput(load, setting, side.name)))


def tokens_rate(result: Result) -> float:
    """Tokens per second of one result."""
    return float(result["tokens_per_second"])
