"""From results to tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vllm_dflash.tools.bench.bench_plan import POISSON, setting_name
from vllm_dflash.tools.bench.results import Result, Results, Rounds, Spread
from vllm_dflash.tools.bench.sides import OURS, PLAIN, Side
from vllm_dflash.tools.step_times import CONTEXT, DRAFT, PLANNING, TARGET
from vllm_dflash.tools.tables import Table

PARTS, ENGINE = (TARGET, DRAFT, CONTEXT, PLANNING), "engine"
"""Of a step. The engine is what is left: scheduling, input, sampling, output."""


def mean_latency(result: Result) -> float:
    """Seconds from a request's arrival to its last token."""
    return float(np.mean(result["to_last_token"]))


def ms_per_token(result: Result) -> float:
    """Mean milliseconds between two tokens of a request, after its first."""
    decoding = np.subtract(result["to_last_token"], result["to_first_token"])
    return float(1000 * np.mean(decoding) / max(1, result["tokens"] - 1))


LATENCIES: dict[str, Callable[[Result], float]] = {
    "mean latency s": mean_latency,
    "p95 latency s": lambda result: float(np.percentile(result["to_last_token"], 95)),
    "mean first token s": lambda result: float(np.mean(result["to_first_token"])),
    "mean ms per token": ms_per_token,
    "makespan s": lambda result: float(result["makespan"]),
}
"""What is reported of a Poisson load, by its column's title."""


def make_tables(results: Results) -> list[Table]:
    """Every table of what was measured."""
    tables: list[Table] = []
    for load in results.loads:
        if load != POISSON:
            tables.append(throughput_table(results, load))
        tables.append(standing_table(results, load))
    return tables


def standing_table(results: Results, load: str) -> Table:
    """Ours against others under one load."""
    return latency_table(results) if load == POISSON else comparison_table(results, load)


def throughput_table(results: Results, load: str) -> Table:
    """Tokens per second of every side."""
    names = [side.name for side in results.sides]
    rows = []
    for setting in results.settings(load):
        rates = [np.median(results.throughput(load, setting, name)) for name in names]
        rows.append([str(setting), *(f"{rate:.1f}" for rate in rates)])
    return Table(f"{load}: tokens/s, median of rounds", [setting_name(load), *names], rows)


def comparison_table(results: Results, load: str) -> Table:
    """Ours against vLLM as it comes; the last row is the geometric mean of the others."""
    opponents = _opponents(results)
    ratios: dict[str, list[Rounds]] = {title: [] for title in opponents}
    rows = []
    for setting in results.settings(load):
        ours = results.throughput(load, setting, OURS)
        row = [str(setting)]
        for title, sides in opponents.items():
            fastest = results.fastest(load, setting, sides)
            ratio = ours / results.throughput(load, setting, fastest.name)
            ratios[title].append(ratio)
            row.append(f"{Spread.of(ratio)}{f', {fastest.draft_length}' * (len(sides) > 1)}")
        rows.append(row)
    means = [Spread.of(np.exp(np.mean(np.log(ratio), axis=0))) for ratio in ratios.values()]
    rows.append(["geometric mean", *map(str, means)])
    title = f"{load}: tokens/s of ours / others', median of paired rounds (min - max)"
    return Table(title, [setting_name(load), *opponents], rows)


def _opponents(results: Results) -> dict[str, list[Side]]:
    """The sides of which the fastest is compared with ours, by the column's title."""
    plain, natives = results.of_kind("plain"), results.of_kind("native")
    opponents = {"/ plain": plain}
    if len(natives) > 1:
        opponents["/ best native"] = natives
    if natives:
        opponents["/ best of both"] = [*plain, *natives]
    for side in [*natives[-1:], *results.of_kind("native schedule", "beside")]:
        opponents[f"/ {side.name}"] = [side]
    return opponents


def latency_table(results: Results) -> Table:
    """Latencies of every side under a Poisson load, with their ratio to plain decoding's."""
    rows = []
    for rate in results.settings(POISSON):
        for side in results.sides:
            row = [str(rate), side.name]
            for value in LATENCIES.values():
                mine = results.rounds(POISSON, rate, side.name, value)
                plain = results.rounds(POISSON, rate, PLAIN, value)
                row.append(f"{np.median(mine):.3f} (x{np.median(mine / plain):.2f})")
            rows.append(row)
    return Table("poisson: median of rounds (x plain)", ["rate", "side", *LATENCIES], rows)


def milliseconds(spent: Mapping[str, float], unit: str) -> dict[str, float]:
    """Of each part that a side has, per step or per token (`unit`) that came out."""
    known = {part: spent[part] for part in PARTS if part in spent}
    parts = known | {ENGINE: spent["seconds"] - sum(known.values())}
    return {part: 1000 * seconds / spent[unit] for part, seconds in parts.items()}


def parts_tables(where: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Where the time goes, per step and per token; `where` is that of a record."""
    tables = []
    for load in dict.fromkeys(one["load"] for one in where):
        for unit, name in (("steps", "step"), ("tokens", "output token")):
            rows = []
            for one in where:
                if one["load"] != load:
                    continue
                spent = one["result"]["spent"]
                parts = milliseconds(spent, unit)
                cells = [f"{parts[part]:.2f}" if part in parts else "" for part in (*PARTS, ENGINE)]
                rows.append([str(one["setting"]), one["side"], *cells])
                rows[-1] += [
                    f"{sum(parts.values()):.2f}",
                    f"{spent['tokens'] / spent['steps']:.2f}",
                ]
            columns = [setting_name(load), "side", *PARTS, ENGINE, "all", "tokens per step"]
            title = f"{load}: where the time goes, ms per {name}, decoding alone"
            tables.append(Table(title, columns, rows, words=(1,)))
    return tables
