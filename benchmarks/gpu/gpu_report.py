"""Report a run: docs/gpu.md with its figure, and all raw results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gpu.gpu_machine import together, version_of
from gpu.gpu_plan import LONGEST, Part
from gpu.gpu_run import Outcome
from gpu.gpu_sizes import SIZES
from vllm_dflash.tools.bench.bench_result import Results, throughput_table
from vllm_dflash.tools.bench.sides import PLAIN, Side
from vllm_dflash.tools.tables import Table

HEAD = """\
# On a GPU

Written by `make gpu` (`benchmarks/gpu`): {took:.0f} minutes of the {planned:.0f} planned. Parts
may have been run one by one: what is told here is of one kind of GPU, the same versions and the
same sources. A part is ended at twice its time, or after {longest:.0f} minutes; an engine without
time for all of its loads leaves out the last ones.
"""
HOW = """\
## How the engines were measured

The demo pair, widened: as many weights, layers and bytes of K/V a token as the model of that name,
and a drafter with the weights of five of its layers. It computes what the small pair does. So **at
contexts up to 2k acceptance is that of a trained pair on text it has not seen**; blocks are of 8,
and with 2,048 entries in the vocabulary, heads and sampling cost less than a real model's. **At 8k
and 32k positions are stretched beyond what the pair was made for: costs are real, acceptance is
not**, so nothing but steps is compared there. Prompts come by again and are found in the prefix
cache: this is decoding. Engines run alone, one after the other; rounds of two of them are no pairs
in time. Of all combinations these were asked for, each with a window to warm up, then {windows}:

{subset}
"""
COUNTERS = [
    *("drafted_steps", "skipped_steps", "mean_draft_length", "mean_acceptance_length"),
    *("captures_after_warmup", "reallocations_after_warmup", "planning_share"),
]


def write_report(
    parts: Sequence[Part], outcomes: Sequence[Outcome], others: Sequence[Outcome], docs: Path
) -> list[Table]:
    """Write `gpu.md`, `gpu.png` and `gpu.json` into a folder. Returns the first tables.

    Args:
        parts: of the whole plan.
        outcomes: of one kind of machine.
        others: outcomes that are only named.
        docs: the folder.
    """
    docs.mkdir(parents=True, exist_ok=True)
    machine = together(one.machine for one in outcomes) or {"name": "nothing was run"}
    raw = {"machine": machine, "outcomes": [asdict(one) for one in outcomes]}
    (docs / "gpu.json").write_text(json.dumps(raw, indent=1))
    about = [
        Table("Machine", [], [[*map(_cell, fact)] for fact in machine.items()], words=(0, 1)),
        parts_table(parts, outcomes),
    ]
    if others:
        about.append(others_table(others))
    took, planned = (sum(one.seconds for one in all_) / 60 for all_ in (outcomes, parts))
    sections = [HEAD.format(took=took, planned=planned, longest=LONGEST / 60)]
    sections += [table.markdown() for table in about]
    for one in outcomes:
        if one.tail:
            sections.append("\n".join([f"### {one.part} failed\n\n```", *one.tail, "```\n"]))
    sections += [table.markdown() for table in (texts_table(outcomes), engines_table(outcomes))]
    measured = [(one, m) for one in outcomes for m in one.data.get("measurements", ())]
    if measured:
        sections.append(_how())
    panels = []
    for load in dict.fromkeys(m["load"] for _, m in measured):
        of_load = [m | {"of": one.data["side"]} for one, m in measured if m["load"] == load]
        results, is_real = whole_sides(of_load), of_load[0]["is_real"]
        if is_real and PLAIN in names(results):
            panels.append((results, load))
        sections += [table.markdown() for table in load_tables(results, load, is_real)]
    (docs / "gpu.png").unlink(missing_ok=True)
    if panels and version_of("matplotlib"):
        from vllm_dflash.tools.bench.plot import plot_panels

        plot_panels(panels, docs / "gpu.png")
        sections.append("![tokens/s relative to plain decoding](gpu.png)\n")
    sections.append("All of it as JSON: [gpu.json](gpu.json).\n")
    (docs / "gpu.md").write_text("\n".join(sections))
    return about


def others_table(others: Sequence[Outcome]) -> Table:
    """List outcomes of other machines, versions or sources."""
    rows = []
    for one in others:
        of = one.machine
        told = (
            of.get("name", "?"),
            of.get("torch", "?"),
            of.get("vllm", "?"),
            of.get("sources", "?"),
        )
        rows.append([one.part, one.outcome, *map(_cell, told)])
    columns = ["part", "outcome", "GPU", "torch", "vLLM", "sources"]
    return Table("Not told here", columns, rows, words=range(6))


def parts_table(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Table:
    """Show how each part ended, including parts that have not been run."""
    ended = {one.part: one for one in outcomes}
    rows = []
    for part in parts:
        row = [part.group, part.name, f"{part.seconds:.0f}", "-", "not run", ""]
        if one := ended.get(part.name):
            row[3:] = [f"{one.seconds:.0f}", one.outcome, _cell(one.words)]
        rows.append(row)
    columns = ["group", "part", "s planned", "s", "outcome", ""]
    return Table("Parts", columns, rows, words=(0, 1, 4, 5))


def texts_table(outcomes: Sequence[Outcome]) -> Table:
    """Compare texts with plain decoding's, and tokens of a verify step with those on a CPU."""
    rows = []
    for one in outcomes:
        for level in one.data.get("levels", ()):
            length, on_a_cpu = level["acceptance_length"], one.data.get("on a CPU")
            numbers = [level[name] for name in ("concurrency", "texts", "identical")]
            numbers += [level[name] for name in ("ties", "regressions")]
            lengths = [f"{each:.2f}" if each else "-" for each in (length, on_a_cpu)]
            rows.append([one.part, *map(str, numbers), *lengths])
    columns = ["part", "concurrency", "texts", "identical", "ties", "regressions"]
    columns += ["tokens a step", "on a CPU"]
    return Table("Texts", columns, rows or [["none", *[""] * 7]], words=(0,))


def engines_table(outcomes: Sequence[Outcome]) -> Table:
    """Show what engines log about themselves, and what our workers say in `dflash_stats`."""
    rows = []
    for one in outcomes:
        if log := one.data.get("log"):
            counters = (
                f"{name.replace('_', ' ')} {stats[name]:.4g}"
                for name in COUNTERS
                if (stats := one.data.get("stats"))
            )
            memory = one.data.get("gpu_memory_mib", "")
            rows.append([one.part, memory, _cell("; ".join([*log, *counters]))])
    columns = ["engine", "MiB of the GPU", "who plans, backends, graphs, memory, counters"]
    return Table("Engines", columns, rows or [["none", "", ""]], words=(0, 2))


def whole_sides(measurements: Sequence[dict[str, Any]]) -> Results:
    """Return results of one load, for the sides that were measured in all settings."""
    settings: dict[str, set[Any]] = {}
    for one in measurements:
        settings.setdefault(one["side"], set()).add(one["setting"])
    most = max(map(len, settings.values()))
    kept = [one for one in measurements if len(settings[one["side"]]) == most]
    return Results([*{one["side"]: Side(**one["of"]) for one in kept}.values()], kept)


def names(results: Results) -> set[str]:
    """Return the names of the sides."""
    return {side.name for side in results.sides}


def load_tables(results: Results, load: str, is_real: bool) -> list[Table]:
    """Make tables of every side's steps and, if acceptance is real, of tokens/s."""
    tables = [throughput_table(results, load)] if is_real else []
    return [*tables, steps_table(results, load)]


def steps_table(results: Results, load: str) -> Table:
    """Make a table of a step's tokens and times: all that can be said if drafts are noise."""
    rows = []
    for setting in results.settings(load):
        row = [str(setting)]
        for side in results.sides:
            made = results.rounds(load, setting, side.name, "tokens_per_output")
            rate = results.rounds(load, setting, side.name)
            milliseconds = 1000 * float(setting or 1) * made / rate
            row.append(f"{np.median(made):.2f}, {np.median(milliseconds):.2f}")
        rows.append(row)
    title = f"{load}: tokens of a request a step, ms a step; medians of rounds"
    return Table(title, ["concurrency", *(side.name for side in results.sides)], rows)


def _how() -> str:
    first = SIZES[0]
    windows = f"{first.rounds} of {first.window_seconds:g} s"
    lines = []
    for size in SIZES:
        lines.append(f"- {size.name}: {', '.join(size.sides)}")
        for load in size.loads:
            counts = ", ".join(map(str, load.concurrency))
            lines.append(f"  - {load.name}: {counts} requests at a time")
    return HOW.format(windows=windows, subset="\n".join(lines))


def _cell(text: str) -> str:
    """Make a text fit into a cell of a Markdown table."""
    return " ".join(text.replace("|", "/").split())
