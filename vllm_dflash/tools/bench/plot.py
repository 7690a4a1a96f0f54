"""The figure of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter

from vllm_dflash.tools.bench.bench_plan import CLOSED, CONTEXT, MIXED, POISSON, SWING, setting_name
from vllm_dflash.tools.bench.bench_report import LATENCIES, oracle_phases, phase_seconds
from vllm_dflash.tools.bench.results import Results, Spread, tokens_rate
from vllm_dflash.tools.bench.sides import PLAIN

Value = Callable[[dict[str, Any]], float]
TITLES = {
    CLOSED: "a fixed number of requests at a time",
    MIXED: "the same, every other text hard to draft",
    "edit": "source code to write out again",
    "quote": "passages to quote from",
    "prose": "passages to go on from",
    SWING: "many requests, then one, and again",
    POISSON: "requests at random moments",
}
X_LABELS = {"concurrency": "requests at a time", CONTEXT: "tokens of context"}


def plot(results: Results, path: Path) -> None:
    """One panel per load, all sides in each."""
    plot_panels([(results, load) for load in results.loads], path)


def plot_panels(panels: Sequence[tuple[Results, str]], path: Path) -> None:
    """One panel for each load of some results."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained"
    )
    for (results, load), panel in zip(panels, axes[0], strict=True):
        panel.set_title(TITLES.get(load, load))
        if load == SWING:
            _swing(results, panel)
        elif load == POISSON:
            title, value = next(iter(LATENCIES.items()))
            panel.set_xlabel("arrivals, as a fraction of plain's throughput")
            _relative_to_plain(results, load, value, title.removesuffix(" s"), panel)
        else:
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(ScalarFormatter())
            panel.set_xlabel(X_LABELS[setting_name(load)])
            _relative_to_plain(results, load, tokens_rate, "tokens/s", panel)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _relative_to_plain(results: Results, load: str, value: Value, name: str, panel: Axes) -> None:
    settings = np.array(results.settings(load), dtype=float)
    styles = _styles(results)
    for side in results.sides:
        spreads = [
            Spread.of(
                results.rounds(load, setting, side.name, value)
                / results.rounds(load, setting, PLAIN, value)
            )
            for setting in settings
        ]
        medians = np.array([spread.median for spread in spreads])
        below = medians - [spread.low for spread in spreads]
        above = [spread.high for spread in spreads] - medians
        panel.errorbar(
            settings, medians, yerr=[below, above], label=side.name, capsize=2, **styles[side.name]
        )
    panel.set_xticks(settings)
    panel.set_ylabel(f"{name} relative to plain")
    panel.grid(alpha=0.3)
    panel.legend()


def _swing(results: Results, panel: Axes) -> None:
    names = [side.name for side in results.sides]
    totals = [Spread.of(phase_seconds(results, name).sum(axis=1)) for name in names]
    medians = np.array([total.median for total in totals])
    spread = [
        medians - [total.low for total in totals],
        [total.high for total in totals] - medians,
    ]
    colours = [style["color"] for style in _styles(results).values()]
    panel.barh(names, medians, xerr=spread, color=colours, capsize=2)
    panel.invert_yaxis()
    panel.axvline(oracle_phases(results).sum(), color="black", linestyle="--")
    panel.set_xlabel("seconds for the same work; dashed: oracle")


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """By side: natives in shades of one colour, so that ours stands out."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"color": "black", "linestyle": "--"},
        "native": {"marker": "."},
        "native schedule": {"color": "tab:green", "marker": "s", "linestyle": "-."},
        "text": {"marker": "^", "linestyle": ":"},
        "blocks": {"color": "tab:orange", "marker": "o"},
        "ours": {"color": "tab:red", "marker": "o", "linewidth": 2.5},
        "ours fixed": {"color": "tab:orange", "marker": ".", "linestyle": ":"},
    }
    styles = {side.name: dict(kinds[side.kind]) for side in results.sides}
    shades = mpl.colormaps["Blues"](np.linspace(0.4, 1, len(results.natives)))
    for side, shade in zip(results.natives, shades, strict=True):
        styles[side.name]["color"] = shade
    purples = mpl.colormaps["Purples"](np.linspace(0.5, 0.9, len(results.beside)))
    for side, shade in zip(results.beside, purples, strict=True):
        styles[side.name].setdefault("color", shade)
    return styles
