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

from support.selection_table import (
    ADAPTIVE,
    ANY,
    CAPABILITIES,
    FEW,
    REFUSED,
    Row,
    cells,
    markdown,
    rows,
    split_page,
)


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def test_every_cell_starts(table: list[Row]) -> None:
    assert [row for row in table if row.error] == []
    assert [row.cell for row in table] == [cell for c in CAPABILITIES for cell in cells(c)]


def test_drafts_are_verified_adaptively_only_if_asked_for_and_where_vllm_allows_it(
    table: list[Row],
) -> None:
    adaptive = {
        (row.cell.capability, row.cell.target): row.mechanism
        for row in table
        if row.cell.is_adaptive
    }
    allowed = {cell for cell, mechanism in adaptive.items() if mechanism == ADAPTIVE}
    assert set(adaptive.values()) == {ADAPTIVE, REFUSED}
    assert {("9.0", "full"), ("10.0", "full")} <= allowed
    assert {row.mechanism for row in table if not row.cell.is_adaptive} == {FEW, ANY}


def test_lengths_to_choose_have_graphs(table: list[Row]) -> None:
    for row in table:
        assert row.ungraphed == [], row
    lengths = {(row.mechanism, *row.lengths) for row in table}
    assert lengths == {(FEW, 0, 1, 3, 7), (ANY, *range(8)), (ADAPTIVE, *range(8)), (REFUSED,)}


def test_the_drafter_captures_one_width(table: list[Row]) -> None:
    widths = {tuple(row.draft_widths) for row in table}
    assert widths == {(), (8,)}


def test_the_page_says_what_is_decided(table: list[Row]) -> None:
    _, written, _ = split_page()
    assert written == markdown(table), "run `make selection`"
