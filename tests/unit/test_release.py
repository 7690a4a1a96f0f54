"""Links between pages."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
