"""README's numbers match the raw file that is kept for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import figures

from vllm_dflash.tools.bench.bench_result import Results, throughput_table
from vllm_dflash.tools.bench.sides import OURS, PLAIN

NATIVE, BLOCKS = ("native K=3", "native K=7"), "ours, blocks only"
ON_A_GPU = {
    "8B": (PLAIN, *NATIVE, OURS),
    "SmolLM2 on HumanEval": (PLAIN, *NATIVE, "ngram", BLOCKS, OURS),
}
"""Columns of docs/benchmarks.md's tables, by the part of docs/gpu.json that has their numbers."""


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_tell_what_was_measured(page: Path) -> None:
    """If this fails, `python benchmarks/figures.py` writes the pages again."""
    raw = json.loads(figures.RAW.read_text())
    text = page.read_text()
    assert figures.with_part(text, figures.PAGES[page](raw)) == text


@pytest.mark.parametrize("part", ON_A_GPU)
def test_the_tables_of_a_gpu_tell_what_was_measured(part: str) -> None:
    raw = json.loads((figures.ROOT / "docs" / "gpu.json").read_text())
    (data,) = (one["data"] for one in raw["outcomes"] if one["part"] == part)
    results, text = Results.read(data), (figures.ROOT / "docs" / "benchmarks.md").read_text()
    (load,) = results.loads
    table = throughput_table(results, load)
    for row in table.rows:
        of = dict(zip(table.columns, row, strict=True))
        cells = [f"{float(of[name]):,.0f}" for name in ON_A_GPU[part]]
        cells += [of["ours / plain"], of["ours / fastest other"].replace("native ", "")]
        assert f"\n| {row[0]} | {' | '.join(cells)} |\n" in text
