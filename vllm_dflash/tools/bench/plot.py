"""The figure of a benchmark's results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt

from vllm_dflash.tools.bench.bench_result import CONCURRENCY, Results
from vllm_dflash.tools.bench.sides import PLAIN

STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "black", "linestyle": "--"},
    "native": {"marker": "."},
    "native schedule": {"color": "tab:green", "marker": "s", "linestyle": "-."},
    "beside": {"marker": "^", "linestyle": ":"},
    "ours": {"color": "tab:red", "marker": "o", "linewidth": 2.5},
}
"""Line styles by kind of side."""
SHADES = {"native": "Blues", "beside": "Purples"}
"""Colour maps of kinds that may have several sides, chosen so that ours stands out."""


def plot_panels(panels: Sequence[tuple[Results, str]], path: Path) -> None:
    """Plot one panel per (results, load): every side relative to plain decoding."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(6 * len(panels), 4.5), squeeze=False, layout="constrained"
    )
    for (results, load), panel in zip(panels, axes[0], strict=True):
        settings, styles = results.settings(load), _styles(results)
        plain = [results.rounds(load, setting, PLAIN) for setting in settings]
        for side in results.sides:
            rounds = [results.rounds(load, setting, side.name) for setting in settings]
            # Lowest, median and highest ratio of the rounds, per setting.
            low, medians, high = np.transpose(
                [np.quantile(a / b, [0, 0.5, 1]) for a, b in zip(rounds, plain, strict=True)]
            )
            panel.errorbar(
                [str(setting) for setting in settings],
                medians,
                yerr=[medians - low, high - medians],
                label=side.name,
                capsize=2,
                **styles[side.name],
            )
        panel.set(
            title=load.replace("$", r"\$"), xlabel=CONCURRENCY, ylabel="tokens/s relative to plain"
        )
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return line styles by name of side."""
    styles = {side.name: dict(STYLES[side.kind]) for side in results.sides}
    for kind, colours in SHADES.items():
        sides = results.of_kind(kind)
        for side, shade in zip(sides, np.linspace(0.4, 1, len(sides)), strict=True):
            styles[side.name]["color"] = mpl.colormaps[colours](shade)
    return styles
