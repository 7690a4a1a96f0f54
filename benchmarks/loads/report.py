"""Tables of more loads, and of where the time of their steps goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loads.step_times import CONTEXT, DRAFT, KINDS, OF_A_KIND, PLANNING, TARGET
from loads.workload import AGENT, SERVED, SWING, setting_name
from vllm_dflash.tools.bench.bench_record import Record
from vllm_dflash.tools.bench.bench_report import Results, Setting
from vllm_dflash.tools.tables import Table

PARTS, ENGINE = (TARGET, DRAFT, CONTEXT, PLANNING), "engine"
"""Parts of a step. `ENGINE` is the rest: scheduling, input, sampling, output."""


class LoadsResults(Results):
    """Measurements of all loads by load, setting and side."""

    def by_setting(self, measurement: dict[str, Any]) -> list[tuple[Setting, dict[str, Any]]]:
        """Make each phase of a swing a setting."""
        if measurement["load"] != SWING:
            return super().by_setting(measurement)
        result = measurement["result"]
        phases = zip(result["concurrency"], result["tokens_per_second"], strict=True)
        return [
            (f"{number}: {count}", {"tokens_per_second": rate})
            for number, (count, rate) in enumerate(phases, 1)
        ]

    def setting_name(self, load: str) -> str:
        """Return what the settings of a load are, for heads of tables."""
        return setting_name(load)

    def tables(self, load: str) -> list[Table]:
        """Make all tables of a load."""
        tables = super().tables(load)
        waits = load in SERVED or load.startswith(AGENT)
        return [*tables, waits_table(self, load)] if waits else tables


@dataclass
class LoadsRecord(Record):
    """Everything that goes into `result.json`.

    Entries of `where` have load, setting, side, and the result, which includes `spent`.
    """

    @property
    def results(self) -> LoadsResults:
        """Results of complete rounds."""
        return LoadsResults(self.sides, self.measurements)

    @property
    def tables(self) -> list[Table]:
        """Tables of `result.md`."""
        return super().tables + parts_tables(self.where)


def waits_table(results: Results, load: str) -> Table:
    """Make the table of waiting times over all rounds: TTFT, and TPOT (mean of each request)."""
    rows = []
    for setting in results.settings(load):
        for side in results.sides:
            cells = [str(setting), side.name]
            for waited in ("first_token_seconds", "token_seconds"):
                rounds = results.values(load, setting, side.name, waited)
                milliseconds = 1000 * np.quantile(np.concatenate(rounds), [0.5, 0.99])
                cells += [f"{one:.0f}" for one in milliseconds]
            rows.append(cells)
    columns = ["TTFT, median", "p99", "TPOT, median", "p99"]
    title = f"{load}: ms to a request's first token (TTFT), and per token after it (TPOT)"
    return Table(title, [setting_name(load), "side", *columns], rows, words=(1,))


def milliseconds(spent: Mapping[str, float], unit: str) -> dict[str, float]:
    """Return the milliseconds of each part that a side has, per step or output token (`unit`)."""
    known = {part: spent[part] for part in PARTS if part in spent}
    parts = known | {ENGINE: spent["seconds"] - sum(known.values())}
    return {part: 1000 * seconds / spent[unit] for part, seconds in parts.items()}


def parts_tables(where: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Make the tables of where the time goes: per step, per token, and by kind of step.

    `where`: that of a `Record`.
    """
    tables = []
    for load in dict.fromkeys(one["load"] for one in where):
        found = [one for one in where if one["load"] == load]
        tables.append(_parts_table(found, load, "steps", "step"))
        tables.append(_parts_table(found, load, "tokens", "output token"))
        tables.append(_kinds_table(found, load))
    return tables


def _kinds_table(where: Sequence[Mapping[str, Any]], load: str) -> Table:
    rows = []
    for one in where:
        spent = one["result"]["spent"]
        for kind in KINDS:
            steps, seconds, *sums = (spent[f"{kind}: {what}"] for what in OF_A_KIND)
            if not steps:
                continue
            cells = [f"{steps:.0f}", f"{seconds / spent['seconds']:.0%}"]
            cells += [f"{value / steps:.1f}" for value in sums]
            cells += [f"{1000 * seconds / steps:.1f}", f"{sums[-1] / seconds:.1f}"]
            rows.append([str(one["setting"]), one["side"], kind, *cells])
    heads = ["steps", "time", "rows", "drafts", "tokens", "ms", "tokens/s"]
    title = f"{load}: kinds of steps, means per step"
    return Table(title, [setting_name(load), "side", "kind", *heads], rows, words=(1, 2))


def _parts_table(where: Sequence[Mapping[str, Any]], load: str, unit: str, name: str) -> Table:
    rows = []
    for one in where:
        spent = one["result"]["spent"]
        parts = milliseconds(spent, unit)
        cells = [f"{parts[part]:.2f}" if part in parts else "" for part in (*PARTS, ENGINE)]
        cells += [f"{sum(parts.values()):.2f}", f"{spent['tokens'] / spent['steps']:.2f}"]
        rows.append([str(one["setting"]), one["side"], *cells])
    columns = [setting_name(load), "side", *PARTS, ENGINE, "all", "tokens per step"]
    alone = "" if load in SERVED else ", decoding alone"
    title = f"{load}: where the time goes, ms per {name}{alone}"
    return Table(title, columns, rows, words=(1,))
