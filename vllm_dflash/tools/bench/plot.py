"""The figure of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

from vllm_dflash.tools.bench.bench_plan import POISSON, setting_name
from vllm_dflash.tools.bench.bench_report import mean_latency
from vllm_dflash.tools.bench.results import Results, Spread, tokens_rate
from vllm_dflash.tools.bench.sides import PLAIN

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "black", "linestyle": "--"},
    "native": {"marker": "."},
    "native schedule": {"color": "tab:green", "marker": "s", "linestyle": "-."},
    "beside": {"marker": "^", "linestyle": ":"},
    "ours": {"color": "tab:red", "marker": "o", "linewidth": 2.5},
    "ours fixed": {"color": "tab:orange", "marker": ".", "linestyle": ":"},
}
"""Of the kinds of sides."""
SHADES = {"native": "Blues", "beside": "Purples"}
"""Of kinds of which there may be several, so that ours stands out."""


def plot_panels(panels: Sequence[tuple[Results, str]], path: Path) -> None:
    """A panel for each load of some results: every side relative to plain decoding."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained"
    )
    for (results, load), panel in zip(panels, axes[0], strict=True):
        value, name = (
            (mean_latency, "mean latency") if load == POISSON else (tokens_rate, "tokens/s")
        )
        settings, styles = results.settings(load), _styles(results)
        for side in results.sides:
            ratios = [
                results.rounds(load, setting, side.name, value)
                / results.rounds(load, setting, PLAIN, value)
                for setting in settings
            ]
            spreads = [Spread.of(ratio) for ratio in ratios]
            medians = [one.median for one in spreads]
            errors = [[one.median - one.low for one in spreads]]
            errors += [[one.high - one.median for one in spreads]]
            panel.errorbar(
                [str(setting) for setting in settings],
                medians,
                yerr=errors,
                label=side.name,
                capsize=2,
                **styles[side.name],
            )
        panel.set(title=load, xlabel=setting_name(load), ylabel=f"{name} relative to plain")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """By side."""
    styles = {side.name: dict(STYLES[side.kind]) for side in results.sides}
    for kind, colours in SHADES.items():
        sides = results.of_kind(kind)
        for side, shade in zip(sides, np.linspace(0.4, 1, len(sides)), strict=True):
            styles[side.name]["color"] = mpl.colormaps[colours](shade)
    return styles
