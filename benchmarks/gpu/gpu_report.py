"""Report a run: docs/gpu.md with its figure, and all raw results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.gpu_machine import together, version_of
from gpu.gpu_plan import LONGEST, Part
from gpu.gpu_run import Outcome
from vllm_dflash.tools.bench.bench_result import Results, tables_of
from vllm_dflash.tools.bench.sides import OURS, PLAIN
from vllm_dflash.tools.tables import Table

HEAD = """\
# On a GPU

Written by `make gpu` (`benchmarks/gpu`): {took:.0f} minutes of the {planned:.0f} planned. Parts
may have been run one by one: what is told here is of one kind of GPU, the same versions and the
same sources. A part is ended at twice its time, or after {longest:.0f} minutes; of a bench, rounds
that were complete by then count.
"""
HOW = """\
## How the engines were measured

By `vllm-dflash bench`: servers that stay up and take turns, and the client of `vllm bench serve`.
Pairs named by a size are the demo pair, widened: as many weights, layers and bytes of K/V a token
as a model of that size, and a drafter with the weights of five of its layers. It computes what the
small pair does, so **acceptance is that of a trained pair on text it has not seen**. Blocks are of
8; with 2,048 entries in the vocabulary, heads and sampling cost less than a real model's. Behind
**random prompts of 8k and 32k drafts mean nothing**: there drafting cannot pay.
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
    measured = [one for one in outcomes if one.data.get("measurements")]
    if measured:
        sections.append(HOW)
    panels = []
    for one in measured:
        results = Results.read(one.data)
        sections.append(f"### {one.part}\n\n`{one.data['about']['command']}`\n")
        sections += [t.markdown() for load in results.loads for t in tables_of(results, load)]
        if {OURS, PLAIN} <= {side.name for side in results.sides}:
            panels += [(results, load) for load in results.loads]
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


def _cell(text: str) -> str:
    """Make a text fit into a cell of a Markdown table."""
    return " ".join(text.replace("|", "/").split())
