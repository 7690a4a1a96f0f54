"""Which engines start on which GPU, and with which graphs: vLLM's code on a faked CUDA.

vLLM's own: the configs with all their validation, the choice of backends, attention layers, cache
groups, `init_attn_backend`, adaptive verification's own checks, the mode of CUDA graphs and the
list of graphs to capture. Ours: the plugin in the front end, and the speculator's graphs.

Left out, because they need a device: weights, the constructors of metadata builders (a class
stands for its instance), GDN layers (a stub with the real backend and cache spec), capture, and
measuring costs. FlashInfer is a package of empty names, and compiled kernels are empty modules.
"""

from __future__ import annotations

import pytest
import vllm
from packaging.version import Version

from support.selection_table import (
    ADAPTIVE,
    ANY,
    CAPABILITIES,
    FEW,
    REFUSED,
    Cell,
    Row,
    cells,
    rows,
)


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def test_every_cell_starts(table: list[Row]) -> None:
    assert [row for row in table if row.error] == []
    assert [row.cell for row in table] == [cell for c in CAPABILITIES for cell in cells(c)]


def expected(cell: Cell) -> str:
    """What docs/compatibility.md says of a cell ("Which GPU and backend")."""
    is_old, is_ada = Version(vllm.__version__) < Version("0.33"), cell.capability[0] == "8"
    if cell.is_adaptive:
        is_allowed = cell.backend == "TRITON_ATTN" or cell.capability in ("9.0", "10.0")
        return ADAPTIVE if is_allowed and cell.target != "hybrid" else REFUSED
    if cell.level in ("-O0", "-O1", "eager"):
        return ANY
    if is_old and "FLASHINFER" in (cell.backend, cell.drafter_backend):
        return ANY if is_ada or not cell.has_kernels else FEW
    return FEW if cell.has_kernels or is_ada else ANY


def test_the_page_says_what_is_decided(table: list[Row]) -> None:
    assert [row for row in table if row.mechanism != expected(row.cell)] == []


def test_the_backend_that_vllm_chooses(table: list[Row]) -> None:
    default = [row for row in table if row.cell == Cell(row.cell.capability)]
    assert {row.cell.capability: row.selected for row in default} == {
        **dict.fromkeys(CAPABILITIES, "FLASH_ATTN"),
        "10.0": "FLASHINFER",
    }


def test_lengths_to_choose_have_graphs(table: list[Row]) -> None:
    for row in table:
        assert row.ungraphed == [], row
    lengths = {(row.mechanism, *row.lengths) for row in table}
    assert lengths == {(FEW, 0, 1, 3, 7), (ANY, *range(8)), (ADAPTIVE, *range(8)), (REFUSED,)}


def test_the_drafter_captures_one_width(table: list[Row]) -> None:
    widths = {tuple(row.draft_widths) for row in table}
    assert widths == {(), (8,)}
