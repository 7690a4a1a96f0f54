"""Makes tables of measurements: medians, and ratios of paired rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dflash.tools.bench.bench_datasets import SETS
from vllm_dflash.tools.bench.bench_plan import CONCURRENCY
from vllm_dflash.tools.bench.sides import OURS, Side
from vllm_dflash.tools.loads import token_seconds
from vllm_dflash.tools.tables import Table

ALL = "all"
POSITIONS = 8
"""Number of positions of a block for which acceptance is shown."""
SEEN = ["acceptance length", "accepted by position", "tokens/s"]
SEEN += ["TTFT", "p99", "TPOT", "p99", "ITL", "p99"]
Setting = str | int
Rounds = npt.NDArray[np.float64]
"""One value per round. Rounds of two sides are paired: divide them before taking the median."""


class Results:
    """Measurements by load, setting and side. Subclasses know other tables."""

    def __init__(self, sides: list[Side], measurements: Iterable[dict[str, Any]]) -> None:
        self.sides = sides
        self._results: dict[tuple[str, Setting, str], list[dict[str, Any]]] = defaultdict(list)
        for one in measurements:
            self._results[one["load"], one["setting"], one["side"]].append(one["result"])

    def tables(self, load: str) -> list[Table]:
        """Make all tables of a load."""
        tables = [throughput_table(self, load), comparison_table(self, load)]
        if load in SETS:
            tables += [categories_table(self, load, one) for one in self.settings(load)]
        return tables

    def interim_table(self, load: str) -> Table:
        """Make the table of a load to print between rounds."""
        return comparison_table(self, load)

    @property
    def loads(self) -> list[str]:
        """Measured loads, in order."""
        return list(dict.fromkeys(load for load, _, _ in self._results))

    def of_kind(self, *kinds: str) -> list[Side]:
        """Return the sides of these kinds, in order."""
        return [side for side in self.sides if side.kind in kinds]

    def settings(self, load: str) -> list[Setting]:
        """Return what a load was measured at, in order."""
        return list(dict.fromkeys(setting for one, setting, _ in self._results if one == load))

    def rounds(
        self, load: str, setting: Setting, side: str, value: str = "tokens_per_second"
    ) -> Rounds:
        """Return one number per round, [rounds]."""
        return np.array(self.values(load, setting, side, value))

    def values(self, load: str, setting: Setting, side: str, value: str) -> list[Any]:
        """Return the value of this name in each round's result."""
        return [result[value] for result in self._results[load, setting, side]]


def spread(rounds: Rounds) -> str:
    """Format the median and range of rounds."""
    return f"{np.median(rounds):.2f} ({rounds.min():.2f} - {rounds.max():.2f})"


def throughput_table(results: Results, load: str) -> Table:
    """Make the table of every side's tokens per second."""
    names = [side.name for side in results.sides]
    rows = []
    for setting in results.settings(load):
        rates = [np.median(results.rounds(load, setting, name)) for name in names]
        rows.append([str(setting), *(f"{rate:.1f}" for rate in rates)])
    return Table(f"{load}: tokens/s, median of rounds", [CONCURRENCY, *names], rows)


def categories_table(results: Results, load: str, setting: Setting) -> Table:
    """Make the table of a set's categories, and of the whole set, on every side."""
    records = {
        side.name: [*chain(*results.values(load, setting, side.name, "requests"))]
        for side in results.sides
    }
    categories = dict.fromkeys(one["category"] for one in chain(*records.values()))
    rows = [
        [category, side, *seen([one for one in of_side if category in (ALL, one["category"])])]
        for category in (*categories, ALL)
        for side, of_side in records.items()
    ]
    title = f"{load}, {setting} in flight, all rounds, per request; TTFT, TPOT, ITL in ms"
    return Table(title, ["category", "side", *SEEN], rows, words=(0, 1))


def seen(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Summarize what clients saw, in the order of `SEEN`; times in ms.

    Each record is a request and has, per output, `seconds` since its arrival and `tokens`. The
    first output is the prompt's; each later one is a step: accepted drafts and the bonus token. ITL
    is the time between two outputs, as in vLLM; tokens/s is the mean speed of one request.
    """
    tokens = [sum(one["tokens"]) for one in records]
    steps = np.concatenate([one["tokens"][1:] for one in records])
    accepted = [(steps > number).mean() for number in range(1, POSITIONS + 1) if len(steps)]
    waits = [one["seconds"] for one in records]
    per_token = token_seconds(waits, tokens)
    cells = [
        f"{steps.mean():.2f}" if len(steps) else "",
        " ".join(f"{part:.2f}" for part in accepted if part),
        f"{sum(tokens) / sum(waited[-1] for waited in waits):.1f}",
    ]
    for waited in ([one[0] for one in waits], per_token, np.concatenate([*map(np.diff, waits)])):
        quantiles = 1000 * np.quantile(waited, [0.5, 0.99]) if len(waited) else []
        cells += [f"{one:.0f}" for one in quantiles] or ["", ""]
    return cells


def comparison_table(results: Results, load: str) -> Table:
    """Make the table of ours relative to the other sides; its last row is the geometric mean."""
    opponents = _opponents(results)
    ratios: dict[str, list[Rounds]] = {title: [] for title in opponents}
    rows = []
    for setting in results.settings(load):
        rates = {side.name: results.rounds(load, setting, side.name) for side in results.sides}
        row = [str(setting)]
        for title, sides in opponents.items():
            fastest = max(sides, key=lambda side: np.median(rates[side.name]))
            ratio = rates[OURS] / rates[fastest.name]
            ratios[title].append(ratio)
            row.append(f"{spread(ratio)}{f', {fastest.draft_length}' * (len(sides) > 1)}")
        rows.append(row)
    means = [spread(np.exp(np.mean(np.log(ratio), axis=0))) for ratio in ratios.values()]
    rows.append(["geometric mean", *means])
    title = f"{load}: tokens/s of ours / others', median of paired rounds (min - max)"
    return Table(title, [CONCURRENCY, *opponents], rows)


def _opponents(results: Results) -> dict[str, list[Side]]:
    """Return the sides per column title; ours is compared with the fastest of them."""
    plain, natives = results.of_kind("plain"), results.of_kind("native")
    opponents = {"/ plain": plain}
    if len(natives) > 1:
        opponents["/ best native"] = natives
    if natives:
        opponents["/ best of both"] = [*plain, *natives]
    for side in [*natives[-1:], *results.of_kind("native schedule", "beside")]:
        opponents[f"/ {side.name}"] = [side]
    return opponents
