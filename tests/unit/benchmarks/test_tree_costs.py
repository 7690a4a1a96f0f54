"""The page on the cost of trees has the table that its script computes."""

from __future__ import annotations

from pathlib import Path

from tree_costs import Step, Target, lines

PAGE = Path(__file__).parents[3] / "docs" / "engineering" / "trees.md"


def test_the_page_has_the_table() -> None:
    assert "\n".join(lines()) in PAGE.read_text()


def test_an_8b_target() -> None:
    target = Target()
    assert 7.4e9 < target.weights < 7.7e9  # 8.2 G without its embedding
    assert target.kv_bytes == 147_456
    assert 4.5e-3 < Step(target, 1, 0, 0).floor() < 4.6e-3  # 15.1 GB
