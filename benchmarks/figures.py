"""Write README's figures from a run of `vllm-dflash bench`: `make figures`.

    scripts/run.sh python benchmarks/figures.py out/figures/result.json

keeps the run's raw numbers as docs/benchmarks.json, and writes docs/benchmarks.png and the parts of
README.md and docs/benchmarks.md between the lines FROM and TO. Without a file, it uses the raw
numbers that are kept. tests/unit/benchmarks/test_readme_figures.py compares the pages with them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dflash.tools.bench.bench_result import Results, throughput_table
from vllm_dflash.tools.bench.plot import plot_panels
from vllm_dflash.tools.bench.sides import OURS, PLAIN

ROOT = Path(__file__).parents[1]
RAW, PICTURE = ROOT / "docs" / "benchmarks.json", ROOT / "docs" / "benchmarks.png"
NAMES = {"human_eval": "code (HumanEval)", "held_out": "the demo pair's"}
"""README's names of prompts, if not those of their files."""
FROM, TO = "<!-- from here on written by `make figures` -->", "<!-- to here -->"


def kept(result: dict[str, Any]) -> str:
    """Return the raw numbers of a run as JSON, one line for each measurement.

    Raises:
        ValueError: fewer than two rounds are complete, or the run has other servers than README
            names.
    """
    sides = {side["name"] for side in result["sides"]}
    if result["rounds_complete"] < 2:
        raise ValueError("fewer than 2 rounds are complete")
    if not {PLAIN, OURS} < sides:
        raise ValueError(f"README's table is of other servers: {sides}")
    head = {name: value for name, value in result.items() if name != "measurements"}
    numbers = [json.dumps(one) for one in result["measurements"]]
    return f'{json.dumps(head)[:-1]}, "measurements": [\n' + ",\n".join(numbers) + "\n]}\n"


def readme_part(raw: dict[str, Any]) -> str:
    """Write README's table, and what it was measured on."""
    results = Results.read(raw)
    natives = results.of_kind("native")
    lengths = ", ".join(str(side.draft_tokens) for side in natives)
    others = sorted(
        (side for side in results.sides if side.kind not in ("plain", "native")),
        key=lambda side: side.name.startswith(OURS),
    )
    columns = {
        PLAIN: results.of_kind("plain"),
        f"vLLM's DFlash, best of K = {lengths} drafts a step": natives,
        **{NAMES.get(side.name, side.name): [side] for side in others},
    }
    heads = ["prompts", "requests at a time", *columns, "ours against the fastest other"]
    lines = ["Tokens/s:", "", f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    rivals = [side.name for side in results.sides if not side.name.startswith(OURS)]
    for load in results.loads:
        for setting in results.settings(load):
            rounds = {side.name: results.rounds(load, setting, side.name) for side in results.sides}
            medians = {name: float(np.median(rates)) for name, rates in rounds.items()}
            best = [max(medians[side.name] for side in sides) for sides in columns.values()]
            ratio = rounds[OURS] / rounds[max(rivals, key=medians.__getitem__)]
            cells = [prompts_of(load), str(setting), *(f"{rate:.0f}" for rate in best)]
            cells += [f"{np.median(ratio):.2f}x ({ratio.min():.2f} - {ratio.max():.2f})"]
            lines.append(f"| {' | '.join(cells)} |")
    about = raw["about"]
    return "\n".join(
        [*lines, "", f"{raw['rounds_complete']} rounds, {about['cores']} cores, {about['cpu']}."]
    )


def prompts_of(load: str) -> str:
    """Return README's name of a load: its prompts, and the temperature if there is one."""
    return ", ".join(NAMES.get(name, name) for name in load.split(", "))


def page_part(raw: dict[str, Any]) -> str:
    """Write the tables of docs/benchmarks.md, with all engines."""
    about = raw["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    preloaded = ", ".join(about["preloaded"]) or "nothing"
    head = (
        f"{about['pair']}; {raw['rounds_complete']} rounds; {about['cores']} cores, {about['cpu']};"
        f" {versions}; preloaded: {preloaded}. `scripts/run.sh {about['command']}`"
    )
    results = Results.read(raw)
    tables = [throughput_table(results, load) for load in results.loads]
    parts = [table.markdown().replace(f"## {table.title}", f"{table.title}:") for table in tables]
    return "\n".join([head, "", *parts]).rstrip()


PAGES = {ROOT / "README.md": readme_part, ROOT / "docs" / "benchmarks.md": page_part}


def with_part(page: str, part: str) -> str:
    """Return the page with this part between its two lines."""
    before, _, rest = page.partition(f"{FROM}\n")
    _, _, after = rest.partition(f"{TO}\n")
    if not after:
        raise ValueError(f"no lines {FROM!r} and {TO!r}")
    return f"{before}{FROM}\n\n{part}\n\n{TO}\n{after}"


def main() -> None:
    """Write everything that is derived from a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("result", type=Path, nargs="?", help="result.json of `vllm-dflash bench`")
    parsed = parser.parse_args()
    if parsed.result is not None:
        RAW.write_text(kept(json.loads(parsed.result.read_text())))
    raw = json.loads(RAW.read_text())
    results = Results.read(raw)
    plot_panels([(results, load) for load in results.loads if "temperature" not in load], PICTURE)
    for page, part in PAGES.items():
        page.write_text(with_part(page.read_text(), part(raw)))


if __name__ == "__main__":
    main()
