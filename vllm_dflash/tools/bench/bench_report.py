"""From results to tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from vllm_dflash.tools.bench.bench_plan import POISSON, SWING, is_throughput, setting_name
from vllm_dflash.tools.bench.results import Results, Rounds, Spread, tokens_rate
from vllm_dflash.tools.bench.sides import OURS, PLAIN, Side
from vllm_dflash.tools.tables import Table

Result = dict[str, Any]


def ms_per_token(result: Result) -> float:
    """Mean milliseconds between two tokens of a request, after its first."""
    decoding = np.subtract(result["to_last_token"], result["to_first_token"])
    return float(1000 * np.mean(decoding) / max(1, result["tokens"] - 1))


LATENCIES: dict[str, Callable[[Result], float]] = {
    "mean latency s": lambda result: float(np.mean(result["to_last_token"])),
    "p95 latency s": lambda result: float(np.percentile(result["to_last_token"], 95)),
    "mean first token s": lambda result: float(np.mean(result["to_first_token"])),
    "mean ms per token": ms_per_token,
    "makespan s": lambda result: float(result["makespan"]),
}
"""What is reported of a Poisson load, by its column's title. The first stands for all in plots."""


def make_tables(results: Results) -> list[Table]:
    """Every table of what was measured."""
    tables: list[Table] = []
    for load in results.loads:
        if is_throughput(load):
            tables += [throughput_table(results, load), comparison_table(results, load)]
        elif load == SWING:
            tables += [phases_table(results), swing_table(results)]
        elif load == POISSON:
            tables.append(latency_table(results))
    return tables


def standing(results: Results) -> list[Table]:
    """Ours against others in few words, for whoever waits for more rounds."""
    tables = []
    for load in results.loads:
        settings = results.settings(load)
        if is_throughput(load):
            rows = [
                [title, *(_ratio(results, load, one, choose(one), tokens_rate) for one in settings)]
                for title, choose in _opponents(results, load).items()
            ]
            columns = [setting_name(load), *map(str, settings)]
            tables.append(Table(f"{load}, so far: tokens/s of ours", columns, rows, words=(0,)))
        elif load == SWING:
            tables.append(swing_table(results))
        elif load == POISSON:
            name, value = next(iter(LATENCIES.items()))
            ratios = [_ratio(results, load, one, results.plain, value) for one in settings]
            title = f"{load}, so far: {name.removesuffix(' s')} of ours"
            tables.append(
                Table(title, ["rate", *map(str, settings)], [["/ plain", *ratios]], words=(0,))
            )
    return tables


def _ratio(
    results: Results,
    load: str,
    setting: float | None,
    other: Side,
    value: Callable[[Result], float],
) -> str:
    """Median over the rounds, of a value of ours and of another side's."""
    ours, others = (results.rounds(load, setting, name, value) for name in (OURS, other.name))
    return f"{np.median(ours / others):.2f}"


def throughput_table(results: Results, load: str) -> Table:
    """Tokens per second of every side."""
    rows = [
        [
            str(setting),
            *(
                f"{np.median(results.throughput(load, setting, side.name)):.1f}"
                for side in results.sides
            ),
        ]
        for setting in results.settings(load)
    ]
    columns = [setting_name(load), *(side.name for side in results.sides)]
    return Table(f"{load}: tokens/s, median of rounds", columns, rows)


def comparison_table(results: Results, load: str) -> Table:
    """Ours against vLLM as it comes; the last row is the geometric mean of the others."""
    opponents = _opponents(results, load)
    ratios: dict[str, list[Rounds]] = {title: [] for title in opponents}
    rows = []
    for setting in results.settings(load):
        row = [str(setting)]
        ours = results.throughput(load, setting, OURS)
        for title, choose in opponents.items():
            opponent = choose(setting)
            ratio = ours / results.throughput(load, setting, opponent.name)
            ratios[title].append(ratio)
            chosen = f", {opponent.draft_length}" if "best" in title else ""
            row.append(f"{Spread.of(ratio)}{chosen}")
        rows.append(row)
    means = [Spread.of(np.exp(np.mean(np.log(ratio), axis=0))) for ratio in ratios.values()]
    rows.append(["geometric mean", *map(str, means)])
    return Table(
        f"{load}: tokens/s of ours / others', median of paired rounds (min - max)",
        [setting_name(load), *opponents],
        rows,
    )


def _opponents(results: Results, load: str) -> dict[str, Callable[[float | None], Side]]:
    """Whom ours is compared with at a setting of a closed load, by the column's title."""
    opponents: dict[str, Callable[[float | None], Side]] = {
        "/ plain": lambda setting: results.plain
    }
    if results.natives:
        longest = results.natives[-1]
        opponents |= {
            "/ best native": lambda setting: results.fastest(load, setting, results.natives),
            "/ best of both": lambda setting: results.fastest(load, setting, results.baselines),
            f"/ {longest.name}": lambda setting: longest,
        }
    if (schedule := results.schedule) is not None:
        opponents[f"/ {schedule.name}"] = lambda setting: schedule
    opponents |= {f"/ {side.name}": partial(_always, side) for side in results.beside}
    return opponents


def _always(side: Side, setting: float | None) -> Side:
    return side


def phase_seconds(results: Results, side: str) -> Rounds:
    """Seconds of each phase of the swing, [rounds, phases]."""
    return results.rounds(SWING, None, side, lambda result: result["seconds"])


def oracle_phases(results: Results) -> Rounds:
    """Median seconds of whichever fixed side is fastest in each phase, [phases]."""
    medians = [np.median(phase_seconds(results, side.name), axis=0) for side in results.fixed]
    return np.min(medians, axis=0)


def phases_table(results: Results) -> Table:
    """Seconds of each phase."""
    names = [side.name for side in results.sides]
    medians = [np.median(phase_seconds(results, name), axis=0) for name in names]
    times = np.array([*medians, oracle_phases(results)])  # [sides + 1, phases]
    concurrency = results.rounds(SWING, None, OURS, lambda result: result["concurrency"])[0]
    rows = [
        [str(number), f"{count:.0f}", *(f"{seconds:.2f}" for seconds in phase)]
        for number, (count, phase) in enumerate(zip(concurrency, times.T, strict=True), 1)
    ]
    rows.append(["all", "", *(f"{seconds:.2f}" for seconds in times.sum(axis=1))])
    return Table(
        "swing: seconds per phase, median of rounds",
        ["phase", "concurrency", *names, "oracle"],
        rows,
    )


def swing_table(results: Results) -> Table:
    """Ours against each side and against switching between them without error."""
    ours = phase_seconds(results, OURS).sum(axis=1)
    rows = [
        [side.name, str(Spread.of(ours / phase_seconds(results, side.name).sum(axis=1)))]
        for side in results.others
    ]
    rows.append(["oracle", str(Spread.of(ours / oracle_phases(results).sum()))])
    return Table(
        "swing: time of ours / others, median of paired rounds (min - max); below 1 is faster",
        ["ours /", "ratio"],
        rows,
    )


def latency_table(results: Results) -> Table:
    """Latencies of every side, with their ratio to plain decoding's."""
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
