"""Report a soak: JSON, Markdown tables and a figure."""

from __future__ import annotations

import json
import math

from soak.soak_run import Soaked
from vllm_dflash.tools.tables import Table


def write_report(soaked: Soaked) -> list[Table]:
    """Write `soak.json`, `soak.md` and `soak.png`. Returns the tables of `soak.md`."""
    out = soaked.settings.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps(soaked.to_dict(), indent=1, default=str))
    tables = make_tables(soaked)
    (out / "soak.md").write_text("\n".join(["# Soak", "", *(t.markdown() for t in tables)]))
    plot(soaked)
    return tables


def make_tables(soaked: Soaked) -> list[Table]:
    """Make tables of the verdict, the figures, and how every behaviour ended."""
    checks = [[c.name, "held" if c.held else "DID NOT HOLD", c.seen] for c in soaked.checks]
    figures = [[name.replace("_", " "), _text(value)] for name, value in soaked.figures.items()]
    endings = [
        [name, ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))]
        for name, statuses in soaked.tally.outcomes.items()
    ]
    return [
        Table("What must hold", ["check", "", "seen"], checks, words=range(3)),
        Table("Figures", ["", "value"], figures, words=(0,)),
        Table(
            "Requests by status (0: the client hung up)",
            ["behaviour", "endings"],
            endings,
            words=range(2),
        ),
    ]


def _text(value: float | tuple[float, ...]) -> str:
    if isinstance(value, tuple):
        return " -> ".join(_text(part) for part in value)
    if math.isnan(value):
        return "none"
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def plot(soaked: Soaked) -> None:
    """Plot memory, latency and load over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [(sample.seconds - soaked.started) / 60 for sample in soaked.samples]
    figure, (memory, latency, load) = plt.subplots(
        3, 1, figsize=(9, 8), sharex=True, layout="constrained"
    )
    memory.plot(minutes, [s.total_rss / (1 << 20) for s in soaked.samples], label="all processes")
    for name in soaked.samples[0].rss:
        memory.plot(minutes, [s.rss.get(name, 0) / (1 << 20) for s in soaked.samples], label=name)
    memory.set_ylabel("RSS, MiB")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize="small")
    latency.plot(
        [(moment - soaked.started) / 60 for moment in soaked.tally.gap_times],
        [1000 * gap for gap in soaked.tally.gaps],
        ".",
        markersize=3,
    )
    latency.set_ylabel("ms between a stream's chunks")
    latency.set_ylim(bottom=0)
    load.plot(minutes, [s.metrics["running"] for s in soaked.samples], label="running")
    load.plot(minutes, [s.metrics["waiting"] for s in soaked.samples], label="waiting")
    load.plot(minutes, [s.others for s in soaked.samples], ":", label="cores of other processes")
    load.set_ylabel("requests")
    load.set_xlabel("minutes")
    load.legend(fontsize="small")
    for panel in (memory, latency, load):
        panel.grid(alpha=0.3)
    figure.savefig(soaked.settings.out / "soak.png", dpi=110)
    plt.close(figure)
