"""Where the time goes: the parts of each side's steps, as tables and as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from vllm_dflash.tools.bench.bench_plan import setting_name, title_of
from vllm_dflash.tools.step_times import CONTEXT, DRAFT, PLANNING, TARGET
from vllm_dflash.tools.tables import Table

ENGINE = "engine"
PARTS = {
    TARGET: "tab:blue",
    DRAFT: "tab:red",
    CONTEXT: "tab:orange",
    PLANNING: "tab:purple",
    ENGINE: "lightgrey",
}
"""With the colour of each. The engine is what is left: scheduling, input, sampling, output."""
STEP, TOKEN = "steps", "tokens"
"""What milliseconds are divided by."""


def milliseconds(spent: Mapping[str, float], unit: str) -> dict[str, float]:
    """Of each part that a side has, per step or per token that came out."""
    known = {part: spent[part] for part in PARTS if part in spent}
    parts = known | {ENGINE: spent["seconds"] - sum(known.values())}
    return {part: 1000 * seconds / spent[unit] for part, seconds in parts.items()}


def parts_tables(where: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Milliseconds per step and per token; `where` is that of a record."""
    tables = []
    for load in dict.fromkeys(one["load"] for one in where):
        of_load = [one for one in where if one["load"] == load]
        for unit, title in ((STEP, "step"), (TOKEN, "output token")):
            columns = [setting_name(load), "side", *PARTS, "all"]
            columns += ["tokens per step"] if unit == STEP else []
            rows = [_row(one, unit) for one in of_load]
            title = f"{load}: where the time goes, ms per {title}, decoding alone"
            tables.append(Table(title, columns, rows, words=(1,)))
    return tables


def _row(one: Mapping[str, Any], unit: str) -> list[str]:
    spent = one["result"]["spent"]
    parts = milliseconds(spent, unit)
    cells = [f"{parts[part]:.2f}" if part in parts else "" for part in PARTS]
    row = [str(one["setting"]), one["side"], *cells, f"{sum(parts.values()):.2f}"]
    return [*row, f"{spent[TOKEN] / spent[STEP]:.2f}"] if unit == STEP else row


def plot_parts(where: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A column of panels for each setting: a bar for each side, per step and per token."""
    settings = list(dict.fromkeys((one["load"], one["setting"]) for one in where))
    figure, axes = plt.subplots(
        2,
        len(settings),
        figsize=(max(7.0, 1.5 + 3.5 * len(settings)), 6),  # the legend needs some
        squeeze=False,
        layout="constrained",
        sharey=True,
    )
    for column, (load, setting) in enumerate(settings):
        sides = [one for one in where if (one["load"], one["setting"]) == (load, setting)]
        axes[0, column].set_title(title_of(load, setting))
        for panel, unit in zip(axes[:, column], (STEP, TOKEN), strict=True):
            bars = [milliseconds(one["result"]["spent"], unit) for one in sides]
            left = [0.0] * len(sides)
            for part, colour in PARTS.items():
                widths = [bar.get(part, 0.0) for bar in bars]
                names = [one["side"] for one in sides]
                panel.barh(names, widths, left=left, color=colour, label=part)
                left = [sum(pair) for pair in zip(left, widths, strict=True)]
            panel.set_xlabel("ms per step" if unit == STEP else "ms per output token")
            panel.grid(axis="x", alpha=0.3)
            panel.set_axisbelow(True)
    axes[0, 0].invert_yaxis()  # shared by all
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS))
    figure.savefig(path, dpi=120)
    plt.close(figure)
