"""docs/recipes: a common form, commands that parse, and the numbers that `inspect` computes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from support import ROOT
from vllm_dflash.checkpoint.read import parse_config
from vllm_dflash.config.speculative_settings import SpeculativeSettings
from vllm_dflash.tools.inspect.memory import loaded_weights

INDEX = ROOT / "docs" / "recipes" / "README.md"
PAGES = sorted(set(INDEX.parent.glob("*.md")) - {INDEX})
SECTIONS = ["Drafters", "Memory", "What to expect", "Known limits", "Measured, and not"]
BFLOAT16 = 2


def published(drafter: str) -> Path:
    return ROOT / "tests" / "data" / "published" / f"{drafter.replace('/', '--')}.json"


def rows(text: str, section: str) -> list[list[str]]:
    """Cells of a section's table, without the header."""
    part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_index_has_them_all() -> None:
    assert {page.name for page in PAGES} == set(
        re.findall(r"\]\((\w[\w.-]+\.md)\)", INDEX.read_text())
    )
    assert len(PAGES) == 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_recipe_has_the_common_form(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    assert "**Not measured**: any of this on a GPU" in text
    command = shlex.split(text.split("```")[1].replace("\\\n", " "))
    assert command[:2] == ["vllm", "serve"]
    config = json.loads(command[command.index("--speculative-config") + 1])
    drafter = SpeculativeSettings.from_config(config).model
    named = [cells[1].strip("`") for cells in rows(text, "Drafters")]
    assert drafter in named
    assert f"vllm-dflash inspect {drafter} --target {command[2]}" in text
    for target, name, most, licence in rows(text, "Drafters"):
        spec = parse_config(
            name.strip("`"), json.loads(published(name.strip("`")).read_text())["config"]
        )
        assert spec.max_draft_tokens == int(most), target
        assert licence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_memory_is_what_inspect_computes(page: Path) -> None:
    for name, weights, per_token in rows(page.read_text(), "Memory"):
        drafter = name.strip("`")
        spec = parse_config(drafter, json.loads(published(drafter).read_text())["config"])
        assert weights == f"{loaded_weights(spec, {}, BFLOAT16) / 2**30:.2f} GiB"
        kept = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * BFLOAT16
        assert per_token == f"{kept / 2**10:.0f} KiB"
