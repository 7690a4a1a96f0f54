"""README's numbers match the raw file that is kept for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import figures

from vllm_dflash.tools.bench.sides import make_sides, tuned_schedule

MADE_UP = {
    "plain": [20.0, 30.0],
    "native K=3": [40.0, 30.0],
    "native K=7": [10.0, 10.0],
    "native schedule": [36.0, 33.0],
    "ours": [44.0, 36.0],
    "ngram": [25.0, 25.0],
}


LOAD = "closed, human_eval, temperature 0.7"


def run(**other: Any) -> dict[str, Any]:
    natives = make_sides("drafter", [3, 7], ["ngram"])
    sides = [*natives, tuned_schedule("drafter", {1: {0: 1.0, 3: 2.0}})]
    measurements = [
        {"load": LOAD, "setting": 8, "side": side, "result": {"tokens_per_second": rate}}
        | {"round": number, "stats": {"much": 1}}
        for side, rates in MADE_UP.items()
        for number, rate in enumerate(rates)
    ]
    about = {"command": "vllm-dflash bench --made-up", "pair": "a pair", "cores": 2, "cpu": "a CPU"}
    about |= {"versions": {"vllm": "1"}, "preloaded": []}
    result = {"about": about, "sides": [vars(side) for side in sides], "rounds": 2}
    return result | {"rounds_complete": 2, "measurements": measurements, "where": []} | other


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_tell_what_was_measured(page: Path) -> None:
    """If this fails, `python benchmarks/figures.py` writes the pages again."""
    raw = json.loads(figures.RAW.read_text())
    text = page.read_text()
    assert figures.with_part(text, figures.PAGES[page](raw)) == text


def test_the_table_of_a_run() -> None:
    text = figures.readme_part(json.loads(figures.kept(run())))
    assert "best of K = 3, 7 drafts a step" in text
    # 44 / 40 and 36 / 30: the ratio in each round, to the engine with the highest median.
    row = "| 8 | 25 | 35 | 25 | 34 | 40 | 1.15x (1.10 - 1.20) |"
    assert f"| code (HumanEval), temperature 0.7 {row}" in text
    assert "2 rounds, 2 cores, a CPU." in text


def test_a_page_names_the_command_and_every_engine() -> None:
    text = figures.page_part(run())
    assert "`scripts/run.sh vllm-dflash bench --made-up`" in text
    names = "plain | native K=3 | native K=7 | ours | ngram | native schedule"
    assert f"| concurrency | {names} |" in text


def test_only_a_run_of_what_readme_tells_is_kept() -> None:
    with pytest.raises(ValueError, match="fewer than 2 rounds"):
        figures.kept(run(rounds_complete=1))
    plain = [side for side in run()["sides"] if side["name"] == "plain"]
    with pytest.raises(ValueError, match="other loads and engines"):
        figures.kept(run(sides=plain))


def test_what_stands_around_a_part_stays() -> None:
    page = f"before\n{figures.FROM}\n\nold\n\n{figures.TO}\nafter\n"
    new = figures.with_part(page, "new")
    assert new == page.replace("old", "new")
    with pytest.raises(ValueError, match="no lines"):
        figures.with_part("a page\n", "new")
