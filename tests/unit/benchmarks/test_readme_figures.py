"""README's numbers match the raw file that is kept for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import figures


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_pages_tell_what_was_measured(page: Path) -> None:
    """If this fails, `python benchmarks/figures.py` writes the pages again."""
    raw = json.loads(figures.RAW.read_text())
    text = page.read_text()
    assert figures.with_part(text, figures.PAGES[page](raw)) == text
