"""A demonstration as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from vllm_dflash.tools.demo.demo_report import name_of
from vllm_dflash.tools.demo.demonstration import Demonstration

COLOURS = {"plain": "silver", "native": "tab:blue", "ours": "tab:green"}


def plot(found: Demonstration, path: Path) -> None:
    """Tokens per second: a panel for each number of requests."""
    figure, axes = plt.subplots(
        1, len(found.levels), figsize=(10, 3.6), squeeze=False, layout="constrained"
    )
    names = [name_of(side) for side in found.sides]
    for (count, level), panel in zip(found.levels.items(), axes[0], strict=True):
        rates = [level[side.name].tokens_per_second for side in found.sides]
        colours = [COLOURS[side.kind] for side in found.sides]
        labels = [
            f"{rate:.0f}  ({found.speedup(count, side):.2f}x)"
            for side, rate in zip(found.sides, rates, strict=True)
        ]
        panel.bar_label(panel.barh(names, rates, color=colours), labels, padding=4)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.35 * max(rates))
        panel.set_title(f"{count} request{'s'[: count > 1]} at a time")
        panel.set_xlabel("tokens/s")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in axes[0][1:]:
        panel.set_yticklabels([])
    figure.savefig(path, dpi=120)
    plt.close(figure)
