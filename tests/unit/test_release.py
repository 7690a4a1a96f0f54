"""What a release says about itself."""

import json
import re
from pathlib import Path

import vllm_dflash

ROOT = Path(__file__).parents[2]


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert first is not None
    assert first[1] == vllm_dflash.__version__


def test_the_documentation_says_what_becomes_of_each_published_drafter() -> None:
    files = (ROOT / "tests" / "data" / "published").glob("*.json")
    published = {json.loads(file.read_text())["checkpoint"] for file in files}
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    assert len(published) >= 40
    assert {name for name in published if f"`{name}`" not in page} == set()


def anchors(page: str) -> set[str]:
    """Anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_of_the_documentation_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    lost = []
    for page in pages:
        for file, _, anchor in re.findall(r"\]\(([^)#:\s]*)(#([^)\s]*))?\)", page.read_text()):
            goal = (page.parent / file) if file else page
            if not goal.exists() or (anchor and anchor not in anchors(goal.read_text())):
                lost.append(f"{page.name}: {file}#{anchor}")
    assert lost == []
