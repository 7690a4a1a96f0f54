"""What a release says of itself."""

import re
from pathlib import Path

import vllm_dflash

ROOT = Path(__file__).parents[2]


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## \[(.+?)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert first is not None
    assert first[1] == vllm_dflash.__version__
