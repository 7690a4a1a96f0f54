"""Which engines start on which GPU, and what plans draft lengths: vLLM's code on a faked CUDA.

vLLM's own: the configs with all their validation, the choice of backends, attention layers, cache
groups, `init_attn_backend`, adaptive verification's own checks, the mode of CUDA graphs and the
list of graphs to capture. Ours: the plugin in the front end, and the speculator, which decides.

Left out, because they need a device: weights, the constructors of metadata builders (a class
stands for its instance), GDN layers (a stub with the real backend and cache spec), capture, and
measuring costs. FlashInfer is a package of empty names, and compiled kernels are empty modules.
"""

from __future__ import annotations

import pytest

from support.selection_table import (
    ANY,
    CAPABILITIES,
    FEW,
    TRIMMED,
    Row,
    cells,
    markdown,
    rows,
    split_page,
    version,
)

IS_0_33 = version() != "0.32"


@pytest.fixture(scope="module")
def table() -> list[Row]:
    return rows()


def test_every_cell_starts(table: list[Row]) -> None:
    assert [row for row in table if row.error] == []
    assert [row.cell for row in table] == [cell for c in CAPABILITIES for cell in cells(c)]


def test_it_is_trimmed_where_vllm_allows_it_but_with_flash_attention(table: list[Row]) -> None:
    left_off = [row for row in table if "not confirmed" in row.why]
    assert {row.mechanism for row in left_off} == {FEW}
    capabilities = {row.cell.capability for row in left_off}
    assert capabilities == ({"9.0", "10.0"} if IS_0_33 else {"9.0"})
    for row in table:
        if row in left_off:
            assert (row.selected, row.verdict) == ("FLASH_ATTN", "")
        elif row.cell.may_trim:
            is_trimmed = row.mechanism == TRIMMED
            assert (row.verdict == "") == (row.why == "") == is_trimmed, row
    failing = {row.verdict for row in table if row.cell.drafter_backend == "FLASHINFER"}
    # vLLM does not check this in advance; on 0.33 every backend has such a graph.
    assert ("no full graph was captured" in failing) is not IS_0_33


def test_lengths_to_choose_have_graphs(table: list[Row]) -> None:
    for row in table:
        assert row.ungraphed == [], row
    lengths = {row.mechanism: tuple(row.lengths) for row in table}
    assert lengths == {TRIMMED: (0, 7), FEW: (0, 1, 3, 7), ANY: tuple(range(8))}


def test_the_drafter_captures_one_width(table: list[Row]) -> None:
    widths = {tuple(row.draft_widths) for row in table}
    assert widths == {(), (8,)}


def test_the_page_says_what_is_decided(table: list[Row]) -> None:
    _, written, _ = split_page()
    assert written == markdown(table), "run `make selection`"
