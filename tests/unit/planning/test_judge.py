"""The judge's cells (`benchmarks/planned_cells.py`), which decide what is changed in planning."""

from __future__ import annotations

import pytest

from support.judged_cells import JudgedCell, cells

CELLS = {cell.name: cell for cell in cells()}
MIXED = [name for name, cell in CELLS.items() if cell.is_mixed]


def test_each_cell_has_a_name_of_its_own() -> None:
    """Results of two versions are compared by name."""
    assert len(CELLS) == len(cells()) > 100
    assert len(MIXED) > 8
    assert all(cell.fixed for cell in CELLS.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_requests_that_stay_different_are_told_apart(name: str) -> None:
    """Nearly as fast as if it had been known which is which."""
    cell: JudgedCell = CELLS[name]
    best = max(cell.rate(0, lengths) for lengths in cell.fixed)
    assert cell.rate(0, None) > 0.93 * best
